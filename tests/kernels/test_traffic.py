"""Bytes are counted to the last one: each kind of operator by hand, each kernel beside its formula, and the modelled cache."""

import inspect

import pytest
import torch

from fourwalls.cost.hardware import Device
from fourwalls.kernels import cache as cache_file
from fourwalls.kernels import formulas
from fourwalls.kernels import traffic as traffic_file
from fourwalls.kernels.cache import PAGE
from fourwalls.kernels.compile import Compiled
from fourwalls.kernels.cross_entropy import cross_entropy_blocks, cross_entropy_separate
from fourwalls.kernels.fusion import (
    bias_gelu_blocks,
    bias_gelu_separate,
    dropout_residual_blocks,
    dropout_residual_separate,
)
from fourwalls.kernels.norm import layer_norm_blocks, layer_norm_online, layer_norm_separate
from fourwalls.kernels.softmax import softmax_blocks, softmax_online, softmax_separate
from fourwalls.kernels.traffic import Operator, tensor_bytes, traffic

from .judge import planted

torch.set_num_threads(1)
KERNELS = {
    "softmax": (softmax_separate, softmax_blocks),
    "layer_norm": (layer_norm_separate, layer_norm_blocks),
    "bias_gelu": (bias_gelu_separate, bias_gelu_blocks),
    "dropout_residual": (dropout_residual_separate, dropout_residual_blocks),
    "cross_entropy": (cross_entropy_separate, cross_entropy_blocks),
}
OPERATORS_OF = {"softmax": 5, "layer_norm": 9, "bias_gelu": 8, "dropout_residual": 5, "cross_entropy": 9}


def inputs_of(operator, rows, columns, dtype=torch.float32):
    x, other = torch.randn(rows, columns, dtype=dtype), torch.randn(rows, columns, dtype=dtype)
    if operator == "dropout_residual":
        x.requires_grad_()  # else nobody needs the mask, and it never leaves the cache
    w, b = torch.randn(columns, dtype=dtype), torch.randn(columns, dtype=dtype)
    labels = torch.randint(columns, (rows,))
    return {
        "softmax": (x,),
        "layer_norm": (x, w, b),
        "bias_gelu": (x, b),
        "dropout_residual": (x, other, 0.1),
        "cross_entropy": (x, labels),
    }[operator]


@pytest.mark.parametrize("operator", formulas.OPERATORS)
@pytest.mark.parametrize(("rows", "columns", "dtype"), ((37, 50, torch.float32), (5, 1000, torch.float64), (1, 3, torch.float32)))
def test_separate_operators_move_what_the_formula_says(operator, rows, columns, dtype):
    counted = traffic(KERNELS[operator][0], *inputs_of(operator, rows, columns, dtype))
    assert counted.bytes == formulas.separate_bytes(operator, rows, columns, itemsize=dtype.itemsize)
    assert counted.operators == OPERATORS_OF[operator] == len(counted.rows)
    assert sum(row.read for row in counted.rows) == counted.bytes_read
    assert sum(row.written for row in counted.rows) == counted.bytes_written


SIZES = ((1037, 500, torch.float32), (600, 1000, torch.float64), (1, 3, torch.float32))


@pytest.mark.parametrize("operator", formulas.OPERATORS)
@pytest.mark.parametrize(("rows", "columns", "dtype"), SIZES)
def test_row_blocks_read_each_input_once_and_write_each_result_once(operator, rows, columns, dtype):
    counted = traffic(KERNELS[operator][1], *inputs_of(operator, rows, columns, dtype), cache=2**20)
    assert counted.bytes == formulas.one_pass_bytes(operator, rows, columns, itemsize=dtype.itemsize)


@pytest.mark.parametrize("operator", formulas.OPERATORS)
def test_whole_tensors_gain_nothing_from_a_cache_that_they_do_not_fit_into(operator):
    given = inputs_of(operator, 1024, 512)  # 2 MiB a tensor
    with_cache, without = (traffic(KERNELS[operator][0], *given, cache=cache).bytes for cache in (2**18, 0))
    assert 0.98 * without < with_cache <= 1.02 * without


def test_rows_longer_than_the_cache_are_read_twice_by_the_running_forms_and_more_often_by_blocks():
    x = torch.randn(3, 2**16)  # 256 KiB a row
    want = formulas.online_softmax_bytes(3, 2**16)
    assert traffic(softmax_online, x, columns=2048, cache=2**17).bytes == want
    assert traffic(softmax_blocks, x, rows=1, cache=2**17).bytes > 2 * want
    w = torch.ones(2**16)
    counted = traffic(layer_norm_online, x, w, w, columns=2048, cache=2**17)
    assert counted.bytes == want + tensor_bytes(w)  # scale and shift are one tensor here


def one(fn, *args, **options):
    """The only operator of fn."""
    (row,) = traffic(fn, *args, **options).rows
    return row


def test_each_kind_of_operator():
    x, y, out = torch.randn(4, 8), torch.randn(4, 8), torch.empty(4, 8)
    n = 4 * 8 * 4
    assert one(torch.add, x, y) == Operator("add", 2 * n, n)
    assert one(torch.mul, x, x) == Operator("mul", n, n)  # the same memory once
    assert one(torch.add, x, y[0]) == Operator("add", n + 32, n)
    assert one(torch.add, x, y[0].expand(4, 8)) == Operator("add", n + 32, n)  # a repeated row lies there once
    assert one(lambda: torch.exp(x, out=out)) == Operator("exp", n, n)  # out is written, not read
    assert one(out.add_, y) == Operator("add_", 2 * n, n)  # in place: read, too
    assert one(out.copy_, y) == Operator("copy_", n, n)
    assert one(out.zero_) == Operator("zero_", 0, n)
    assert one(out.uniform_) == Operator("uniform_", 0, n)
    assert one(torch.zeros_like, x) == Operator("zeros_like", 0, n)
    assert one(lambda: x.t() > 0) == Operator("gt", n, 32)  # bools have one byte
    assert one(lambda: x.double()) == Operator("_to_copy", n, 2 * n)
    assert one(x.gather, 1, torch.zeros(4, 1, dtype=torch.int64)) == Operator("gather", 16 + 32, 16)  # four numbers of x
    index = torch.zeros(4, 1, dtype=torch.int64)
    assert one(out.scatter_add_, 1, index, y[:, :1]) == Operator("scatter_add_", 16 + 32 + 16, 16)  # four of out, too


def test_views_and_empty_places_move_nothing():
    x = torch.randn(4, 8, 2)
    for view in (lambda: x.transpose(0, 1), lambda: x[1:], lambda: x.view(8, 8), lambda: x.flatten(1), x.detach):
        assert traffic(view).rows == ()
    assert traffic(torch.empty, 100).bytes == 0
    assert traffic(lambda: x.sum().item()).operators == 1  # reading the number is no operator


def test_a_product_has_torchs_flops_and_its_three_matrices():
    a, b = torch.randn(2, 5, 7), torch.randn(2, 7, 3)
    counted = traffic(torch.matmul, a, b)
    assert counted.flops == 2 * 2 * 5 * 7 * 3
    assert (counted.bytes_read, counted.bytes_written) == (4 * 2 * 7 * (5 + 3), 4 * 2 * 5 * 3)
    assert counted.intensity == counted.flops / counted.bytes
    device = Device("d", {"float32": 1e3}, 1, 100.0)
    assert counted.seconds(device) == max(counted.flops / 1e3, counted.bytes / 100.0) == counted.bytes / 100.0
    assert traffic(torch.matmul, torch.randn(64, 64), torch.randn(64, 64)).seconds(device) == 2 * 64**3 / 1e3


def test_backward_is_counted():
    x = torch.randn(4, 8, requires_grad=True)
    names = [row.name for row in traffic(lambda: x.exp().sum().backward()).rows]
    assert names[:2] == ["exp", "sum"] and "mul" in names


def test_the_cache_keeps_what_was_used_last():
    x, room = torch.randn(8 * PAGE // 4), torch.empty(PAGE // 4)
    first, second = x[: PAGE // 4], x[PAGE // 4 : 2 * PAGE // 4]

    def twice():
        return torch.add(first, second, out=room), torch.add(first, second, out=room)

    assert traffic(twice).bytes == 6 * PAGE
    assert traffic(twice, cache=3 * PAGE).bytes == 3 * PAGE  # all three stay, and the result is written back once
    assert traffic(twice, cache=PAGE).bytes == 6 * PAGE
    short = torch.empty(3)
    assert traffic(short.zero_, cache=PAGE).bytes == 12  # a storage may end before its page does
    assert traffic(lambda: torch.zeros(PAGE).exp().sum(), cache=2**20).bytes == 4  # what is freed in the cache is never written


def test_columns_touch_the_pages_they_lie_in():
    x = torch.zeros(6, 2 * PAGE // 4)  # two pages a row
    assert traffic(lambda: x[:, :5].sum(), cache=2**20).bytes_read == 6 * PAGE
    assert traffic(lambda: x.t().sum(), cache=2**20).bytes_read == 12 * PAGE
    assert traffic(lambda: x[2:4].sum(), cache=2**20).bytes_read == 4 * PAGE


def test_the_table_adds_up_and_wrong_asks_are_refused():
    counted = traffic(softmax_blocks, torch.randn(64, 64), cache=2**20)
    text = counted.table()
    assert len(text.splitlines()) == 1 + counted.operators + 2 and "written back at the end" in text
    with pytest.raises(ValueError, match="allowed: 0 for none, or at least 4096"):
        traffic(torch.exp, torch.ones(3), cache=100)
    with pytest.raises(ValueError, match="shows no operators"):
        traffic(Compiled(torch.exp), torch.ones(3))
    with pytest.raises(ValueError, match="operator is 'gelu'; allowed: softmax"):
        formulas.separate_bytes("gelu", 3, 3)
    with pytest.raises(ValueError, match="columns is -1"):
        formulas.one_pass_bytes("softmax", 3, -1)


FAULTS = {
    "out= is read": ("changed and (argument.is_out or packet in _OVERWRITES)", "False"),
    "an operand counts each time it is named": (
        "return list({(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in tensors}.values())",
        "return list(tensors)",
    ),
    "repeated rows count each time": ("if stride or n == 0)", "if True)"),
    "views are copied": ("if t.untyped_storage()._cdata not in own]", "]"),
    "what is freed is written back": ("self._held.pop((number, page), None)", "pass"),
    "dirty pages leave in silence": ("back += self._bytes(oldest) if was_dirty else 0", "back += 0"),
}


def counts(of):
    x, row, out = torch.ones(512, 64), torch.ones(1, 64), torch.empty(512, 64)
    return [
        of(softmax_separate, x).bytes,
        of(lambda: torch.exp(x * x + row.expand(512, 64).transpose(0, 1).t(), out=out).view(-1)).bytes,
        of(softmax_blocks, x, rows=16, cache=2**15).bytes,
        of(softmax_separate, x, cache=2**15).bytes,
    ]


@pytest.fixture(scope="module")
def right():
    found = counts(traffic)
    assert found[2] == formulas.one_pass_bytes("softmax", 512, 64)
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_count_is_caught(right, name):
    old, new = FAULTS[name]
    if old in inspect.getsource(cache_file):
        changed = planted(traffic_file, "__all__", "__all__", Cache=planted(cache_file, old, new).Cache)
    else:
        changed = planted(traffic_file, old, new)
    assert counts(changed.traffic) != right
