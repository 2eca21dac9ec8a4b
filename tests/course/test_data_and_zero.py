"""What judges labs 2 and 3 sees one element that is off by ten times the bound, and a process that has taken too much."""

import gc
import mmap
import os
from types import SimpleNamespace

import pytest
import torch

from fourwalls.course import lab_data, lab_zero
from fourwalls.course.expect import Wrong
from fourwalls.course.lab_data_grads import CLOSE, names_of, same_gradients
from fourwalls.course.process_memory import Scale, resident, weigh

GRADS = [torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3), torch.ones(3, dtype=torch.float64), None]
NAMES = names_of(2)[:3]


def changed(factor=1.0, one=0.0):
    found = [None if g is None else g * factor for g in GRADS]
    found[0][1, 2] += one
    return found


@pytest.mark.parametrize("kind", ["within", "ten times", "nan"])
def test_one_element_of_a_gradient_that_is_off_by_ten_times_the_bound_is_seen(kind):
    bound = CLOSE * (1 + 2)
    if kind == "within":
        same_gradients(changed(one=bound / 2), GRADS, "2 ranks: rank 0", NAMES)
        return
    with pytest.raises(
        Wrong, match="2 ranks: rank 0: the gradient of weight 0: 1 of 6 elements are wrong, the first at"
    ) as wrong:
        same_gradients(changed(one=10 * bound if kind == "ten times" else float("nan")), GRADS, "2 ranks: rank 0", NAMES)
    assert "which number here is that" not in wrong.value.hint or kind == "ten times"


@pytest.mark.parametrize(
    ("found", "says", "hint"),
    [
        (changed(4.0), "6 of 6", "all gradients are 4.000 times one device's"),
        ([*changed()[:1], None, None], "bias 0 has no gradient", "who needs the mean"),
        ([*changed()[:2], torch.ones(2)], "the frozen weight 1 has a gradient", "who is trained"),
        ([changed()[0].float(), *changed()[1:]], "is float32", "wanted is float64"),
        ([changed()[0].view(3, 2), *changed()[1:]], r"shape \(3, 2\)", r"wanted is (2, 3)"),
        (None, "no gradients came back", ""),
    ],
    ids=["factor", "missing", "frozen", "dtype", "shape", "nothing"],
)
def test_each_kind_of_wrong_gradient_has_its_words(found, says, hint):
    with pytest.raises(Wrong, match=says) as wrong:
        same_gradients(found, GRADS, "2 ranks: rank 0", NAMES)
    assert hint in wrong.value.hint


# --- memory -------------------------------------------------------------------------------------------------------------
linux = pytest.mark.skipif(resident(os.getpid()) is None, reason="the system does not tell")


@linux
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_the_system_counts_pages_that_are_written_whatever_holds_them(shared):
    size = 32 * 2**20
    text = bytes(size // 2) + b"x" * (size // 2)
    gc.collect()  # what earlier tests left must not be given back in between
    before = resident(os.getpid())
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    with mmap.mmap(-1, size, flags) as pages:
        untouched = resident(os.getpid()) - before
        pages.write(text)
        grown = resident(os.getpid()) - before
    assert untouched < size // 8 < size - size // 8 < grown


@linux
def test_growth_is_what_a_child_has_more_than_its_parent_when_it_sends(tmp_path):
    scale = Scale(os.getpid())
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        pages = mmap.mmap(-1, 2**24, mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE)
        pages.write(b"x" * 2**24)
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        scale(0, child, "barrier")
        assert scale.growth(0) is None, "only what it sends is a time to look"
        scale(0, child, "isend")
    finally:
        os.write(go[1], b".")
        os.waitpid(child, 0)
        for fd in (*ready, *go):
            os.close(fd)
    assert scale.growth(0) > 0.8 * 2**24


def test_too_much_is_wrong_and_what_is_not_told_is_said():
    grown = SimpleNamespace(growth=lambda rank: (3, 5)[rank] * 2**20, beside=2, shrunk=lambda rank: 0)
    assert weigh(grown, 2, 5 * 2**20, 2**23, "gradients") == "a process grows by 5.0 MiB, of 8 MiB of gradients"
    with pytest.raises(Wrong, match="a process has grown by 5.0 MiB, target 4.0"):
        weigh(grown, 2, 4 * 2**20, 2**23, "gradients")
    assert "not told" in weigh(SimpleNamespace(growth=lambda rank: None), 2, 1, 2**23, "gradients")
    with pytest.raises(Wrong, match="3 processes are at work"):
        weigh(SimpleNamespace(**(vars(grown) | {"beside": 3})), 2, 5 * 2**20, 2**23, "gradients")
    with pytest.raises(Wrong, match="a process has given back 2.0 MiB"):
        weigh(SimpleNamespace(**(vars(grown) | {"shrunk": lambda rank: rank * 2**21})), 2, 5 * 2**20, 2**23, "gradients")
    assert resident(2**22 + 1) is None


# --- twists -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lab", [lab_data, lab_zero], ids=["data", "zero"])
def test_every_class_has_a_twist_and_the_words_say_it(lab):
    plain = "\n".join(line for p in lab.problems().values() for line in p.spec.wants)
    assert "r + 1" not in plain
    drawn = {seed: lab.twist(seed) for seed in range(20)}
    assert lab.twist(3) == drawn[3] and len({tuple(t.values()) for t in drawn.values()}) > 8
    for seed, t in drawn.items():
        said = "\n".join(line for p in lab.problems(seed).values() for line in p.spec.wants)
        assert ("counts r + 1 times" in said) is t["weighted"]
    minutes = sum(p.spec.minutes for p in lab.problems().values())
    assert minutes in (100, 110)
