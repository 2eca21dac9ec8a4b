"""Cross-entropy: loss and gradient equal to float64's in every form; what each keeps; labels that are none are refused."""

import math

import pytest
import torch
import torch.nn.functional as F

from fourwalls.kernels import cross_entropy as file
from fourwalls.kernels.attention import peak_bytes
from fourwalls.kernels.cross_entropy import cross_entropy_blocks, cross_entropy_in_place, cross_entropy_separate

from .judge import numbers, planted, spoiled, unit, wrong

torch.set_num_threads(1)
FORMS = {
    "separate": cross_entropy_separate,
    "blocks": cross_entropy_blocks,
    "blocks of 3": lambda x, t: cross_entropy_blocks(x, t, rows=3),
    "in place": cross_entropy_in_place,
    "in place by 3": lambda x, t: cross_entropy_in_place(x, t, rows=3),
}


def given(rows=7, columns=20, dtype=torch.float64, scale=3.0):
    labels = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(rows))
    return numbers(rows, columns, dtype=dtype, scale=scale), labels


def exactly(x, labels, up=1.0):
    leaf = x.detach().double().clone().requires_grad_()
    loss = F.cross_entropy(leaf, labels)
    return loss.detach(), torch.autograd.grad(loss * up, leaf)[0]


def bounds(x, labels):
    """Of the loss and of the gradient: a softmax's, and the few roundings of logarithm, mean and the one at the target."""
    wide = x.double()
    size = float((wide - wide.amax(-1, keepdim=True)).abs().max()) + math.log(x.shape[1]) + 2
    u, (rows, columns) = unit(x.dtype), x.shape
    gradient = (torch.softmax(wide, -1) * (2 * columns + 4 * size + 16) + 8 * F.one_hot(labels, columns)) * u / rows
    return (rows + columns + 8) * u * size, gradient + torch.finfo(x.dtype).tiny


def outcome(fn, x, labels, up=1.0):
    leaf = x.detach().clone().requires_grad_()
    logits = leaf * 1  # no leaf: as the output of a layer
    loss = fn(logits, labels)
    gradient = torch.autograd.grad(loss * up, leaf)[0]
    return loss, gradient


def faults(fn, x, labels, up=1.0):
    """Which of loss and gradient are wrong."""
    (loss, gradient), (exact, exact_gradient) = outcome(fn, x, labels, up), exactly(x, labels, up)
    of_loss, of_gradient = bounds(x, labels)
    found = []
    if wrong(loss, exact, of_loss):
        found.append("loss")
    if wrong(gradient, exact_gradient, of_gradient * max(abs(up), 1)):
        found.append("gradient")
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_are_float64s_within_the_bound(form, dtype):
    for rows, columns, scale, up in ((7, 20, 3.0, 1.0), (1, 5, 1.0, 0.37), (10, 1, 1.0, 1.0), (6, 300, 40.0, -2.0)):
        x, labels = given(rows, columns, dtype, scale)
        assert faults(FORMS[form], x, labels, up) == []
    exact, gradient = exactly(x, labels)
    of_loss, of_gradient = bounds(x, labels)
    assert wrong(spoiled(exact, of_loss), exact, of_loss) == 1
    assert wrong(spoiled(gradient, of_gradient), gradient, of_gradient) == 1


def test_in_place_writes_the_gradient_where_the_logits_were():
    x, labels = given()
    want = exactly(x, labels)[1]
    place = x.clone()
    loss = cross_entropy_in_place(place, labels)  # nobody asked for a gradient: the logits are lost all the same
    assert torch.allclose(place, want, atol=1e-15) and torch.allclose(loss, F.cross_entropy(x, labels))
    leaf = x.clone().requires_grad_()
    logits = leaf * 1
    cross_entropy_in_place(logits, labels).backward()
    assert torch.allclose(leaf.grad, want, atol=1e-15) and logits.data_ptr() != leaf.data_ptr()


def test_an_operator_that_keeps_its_output_is_not_given_a_wrong_gradient():
    leaf = given()[0].requires_grad_()
    loss = cross_entropy_in_place(leaf.exp(), given()[1])  # exp keeps its output for backward, which is now overwritten
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_peak_falls_from_form_to_form():
    """Of (r, V) numbers: two are the least with a gradient of its own, one where it takes the logits' place."""
    x, labels = torch.randn(64, 512), torch.randint(512, (64,))
    whole = x.numel() * 4

    def peak(fn):
        return peak_bytes(lambda x: fn(x, labels), x.clone(), backward=True) / whole

    assert peak(cross_entropy_separate) > 3
    assert 2 < peak(lambda x, t: cross_entropy_blocks(x, t, rows=3)) < 2.1
    assert 1 < peak(lambda x, t: cross_entropy_in_place(x, t, rows=3)) < 1.1


@pytest.mark.parametrize("form", FORMS)
def test_odd_rows_are_as_torch_has_them(form):
    inf, nan = math.inf, math.nan
    rows = ([0.0] * 4, [1e-45, 0, 1e-40, 0], [1e30, 0, -1e30, 0], [-inf, 0, 1, 2], [inf, 0, 1, 2], [-inf] * 4, [nan, 0, 1, 2])
    for row in rows:
        x, labels = torch.tensor([row, [1.0, 2, 3, 4]]), torch.tensor([1, 0])
        loss, gradient = outcome(FORMS[form], x, labels)
        exact, exact_gradient = exactly(x, labels)
        assert wrong(loss, exact, 1e-6 * abs(float(exact))) == 0, row
        assert wrong(gradient[1], exact_gradient[1], 1e-7) == 0, row  # one bad row spoils the loss, and no other row's gradient
        assert bool(gradient[0].isnan().any()) == bool(exact_gradient[0].isnan().any()), row
    certain = torch.tensor([[-inf, 0.0]])
    assert FORMS[form](certain.clone(), torch.tensor([0])) == inf and FORMS[form](certain, torch.tensor([1])) == 0
    assert FORMS[form](torch.empty(0, 4), torch.empty(0, dtype=torch.int64)).isnan()  # as torch says: a mean over nothing


@pytest.mark.parametrize("form", FORMS)
def test_labels_that_are_none_are_refused_before_anything_is_overwritten(form):
    x, labels = given(4, 5)
    before = x.clone()
    for bad, words in (
        (torch.tensor([0, 1, 5, 2]), r"target 5 in row 2; allowed: 0 to 4, the columns of the logits"),
        (torch.tensor([0, -1, 7, 2]), "target -1 in row 1"),
        (torch.tensor([0, 1, -100, 2]), "target -100 in row 2"),
        (labels.int(), "int32; allowed: int64"),
        (labels.double(), "float64; allowed: int64"),
        (labels[:3], r"allowed: \(r, V\) and \(r,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            FORMS[form](x, bad)
    with pytest.raises(ValueError, match="V of at least 1"):
        FORMS[form](x[:, :0], labels)
    with pytest.raises(ValueError, match="cross-entropy of int64"):
        FORMS[form](x.long(), labels)
    assert torch.equal(x, before)


def test_backward_in_place_can_be_done_once():
    leaf = given()[0].requires_grad_()
    loss = cross_entropy_in_place(leaf * 1, given()[1]) * 2
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


BLOCKS, IN_PLACE = "cross_entropy_blocks", "cross_entropy_in_place"
FAULTS = {  # name: (old, new, the form, what is wrong, what stays right)
    "sum in place of mean, loss": (
        "        ctx.rows = rows\n        return (loss / count)", "        ctx.rows = rows\n        return (loss)", BLOCKS,
        ["loss"]),
    "sum in place of mean, gradient": (
        "share = grad.to(total.dtype) / max(len(logits), 1)", "share = grad", BLOCKS, ["gradient"]),
    "sum in place of mean, in place": ("y.div_(total.mul_(count))", "y.div_(total)", IN_PLACE, ["gradient"]),
    "one not taken away at the target": (
        "            y.scatter_add_(-1, targets[block, None], -share.to(y.dtype).expand(len(y), 1))\n", "", BLOCKS, ["gradient"]),
    "one taken away for the batch and not the row": ("-1 / max(count, 1)", "-1.0", IN_PLACE, ["gradient"]),
    "maximum forgotten at the target": ("x.gather(-1, targets[:, None]).sub_(largest)", "x.gather(-1, targets[:, None])", BLOCKS,
                                        ["loss"]),
    "what comes from above forgotten": (
        "return over if bool(grad == 1) else over.mul_(grad), None, None", "return over, None, None", IN_PLACE, ["gradient"]),
    "the first block's labels for all": (
        "_block_loss(logits[block], targets[block],", "_block_loss(logits[block], targets[: len(weights)],", BLOCKS, ["loss"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_name(name):
    old, new, form, spoiled_by_it = FAULTS[name]
    x, labels = given(6, 11)
    assert faults(lambda x, t: getattr(file, form)(x, t, rows=2), x, labels, 0.5) == []
    module = planted(file, old, new)
    assert faults(lambda x, t: getattr(module, form)(x, t, rows=2), x, labels, 0.5) == spoiled_by_it
