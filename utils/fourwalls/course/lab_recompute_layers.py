"""Lab 4, how `run_segments` and `selective` are judged.

The same layers are run here: plainly for values and gradients, and with the library's own checkpoint for what lives after
forward and at the peak of backward. Each layer notes when it runs, so that the order of the second runs tells where segments
lie.

    after forward: one tensor a segment        in backward: the layers of one segment, then those of the one before

Reference: Chen et al. 2016 (arXiv:1604.06174), section 4.
"""

import math

import torch

from ..memory.recompute import checkpoint
from .drivers_recompute import Block, chain, measured
from .expect import close, draw, expect, own_products, tensor
from .problem import Session
from .process_memory import Pause

__all__ = [
    "segments_kept",
    "segments_order",
    "segments_peak",
    "segments_values",
    "selective_calls",
    "selective_kept",
    "selective_values",
    "weighed",
]

LIMIT = 8.0  # seconds of a run
ROWS, NARROW, WIDE = 384, 24, 40  # of what lies between layers: much more than their weights
STATE = 5056  # bytes of a random generator's state, which a segment may keep as well
CASES = ((13, 4, 0.0), (4, 1, 0.0), (3, 3, 0.0), (7, 3, 0.2), (1, 1, 0.0))  # layers, segments, dropout
SLACK = 1.05  # of bytes: "within 5%"
MiB = 2**20
LARGE, OWN = 24576, 20 * MiB  # rows of what is weighed by the system; twice what a forked interpreter has of its own


def _cut(s: Session, count: int, k: int) -> list[list[int]]:
    """The numbers of the layers in each segment."""
    size, odd = divmod(count, k)
    longer = range(odd) if s.twist["longer"] == "first" else range(k - odd, k)
    found, at = [], 0
    for number in range(k):
        end = at + size + (number in longer)
        found.append(list(range(at, end)))
        at = end
    return found


def _through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def _ours(s: Session, layers, x, k):
    """run_segments, as it should be."""
    cut = _cut(s, len(layers), k)
    for number, mine in enumerate(cut):
        some = [layers[i] for i in mine]
        x = _through(some, x) if s.twist["tail"] and number == len(cut) - 1 else checkpoint(_through, some, x)
    return x


def _here(make, tensors, c, seed):
    """What the driver tells, for a run of ours: make(leaves, calls) -> function of nothing."""
    leaves, calls = [x.clone().requires_grad_() for x in tensors], []
    with torch.random.fork_rng(devices=[]):
        return measured(make(leaves, calls), leaves, calls, c, seed, (1, 1, 1), collect=lambda: None)  # ours leave no circles


def _segmented(s: Session, count, k, p, *, rows=ROWS, weigh=None):
    """(where, what came, a plain run, a run with segments of ours)."""
    if (count, k, rows) not in s.remembered:
        widths = [s.dice.randrange(NARROW, WIDE + 1, 4) for _ in range(count + 1)]
        weights = [draw(s, a, b) / a**0.5 for a, b in zip(widths, widths[1:], strict=False)]
        x, c, seed = draw(s, rows, widths[0]), draw(s, rows, widths[-1]), s.dice.randrange(2**31)
        sizes = [s.dice.randrange(2, 6) for _ in range(3)]
        told = s.run(sizes, x, weights, p, k, c, seed, limit=LIMIT, each=weigh).values[0]
        tensors = [x, *weights]
        plain = _here(lambda own, calls: lambda: _through(chain(own[1:], p, calls), own[0]), tensors, c, seed)
        ours = None if p else _here(lambda own, calls: lambda: _ours(s, chain(own[1:], p, calls), own[0], k), tensors, c, seed)
        own_products(told["seen"], sizes)
        s.remembered[count, k, rows] = f"{count} layers, k={k}", told, plain, ours
    return s.remembered[count, k, rows]


def _same(where, told, plain, names):
    close(tensor(told["y"], plain["y"].shape, torch.float64, f"{where}: the result"), plain["y"], 1e-12, f"{where}: the result")
    for name, found, exact in zip(names, told["grads"], plain["grads"], strict=True):
        what = f"{where}: the gradient of {name}"
        expect(found is not None, f"{what} is missing")
        close(tensor(found, exact.shape, torch.float64, what), exact, 1e-11 * (1 + exact.abs().max()), what)
    expect(torch.equal(told["after"], plain["after"]), f"{where}: random numbers drawn after backward are others")


def segments_values(s: Session):
    for count, k, p in CASES:
        where, told, plain, _ = _segmented(s, count, k, p)
        _same(where, told, plain, ["x", *(f"layer {i}'s weight" for i in range(count))])


def weighed(pause: Pause, right: int, more: int) -> str:
    """Wrong if a process had much more memory of its own between forward and backward than `right` bytes; who forgets nothing
    has `more` on top, the interpreter some MiB. What a process says of itself depends on what is in it; this does not.
    """
    if pause.most is None:
        return "memory of processes is not told on this system"
    assert more > OWN, "too small to be seen"
    limit = right + more // 2
    said = f"{pause.most / MiB:.1f} MiB of memory after forward, target {limit / MiB:.1f} (the system's count)"
    expect(pause.most <= limit, said, "who holds on to what was computed?")
    return said


def segments_order(s: Session):
    for count, k, p in CASES:
        where, told, _, _ = _segmented(s, count, k, p)
        calls, first = told["calls"], told["forward calls"]
        expect(calls[:first] == list(range(count)), f"{where}: in forward the layers ran as {_few(calls[:first])}")
        most = max(range(count), key=calls.count)
        times = calls.count(most)
        expect(times <= 2, f"{where}: layer {most} ran {times} times", "from where does each second run begin?")
        cut = _cut(s, count, k)
        again = cut[:-1] if s.twist["tail"] else cut
        wanted = [i for mine in again[::-1] for i in mine]
        hint = "which segment is the longer one here, and is the last one forgotten?"
        expect(calls[first:] == wanted, f"{where}: in backward the layers ran again as {_few(calls[first:])}", hint)


def _few(calls):
    return ", ".join(map(str, calls[:24])) + (" ..." if len(calls) > 24 else "") if calls else "none"


def segments_kept(s: Session):
    said = []
    for count, k, p in CASES[:3]:
        where, told, plain, ours = _segmented(s, count, k, p)
        found, target = told["kept"], ours["kept"] + k * STATE
        hint = f"without forgetting it would be {plain['kept'] / target:.1f} times the target: who holds the rest?"
        expect(found <= SLACK * target, f"{where}: {found:,} bytes live after forward, target {target:,}", hint)
        said.append(f"k={k}: {found / 1e6:.2f} MB instead of {plain['kept'] / 1e6:.2f}")
    count, k = 12, 3
    pause = Pause(s.apart.pid)
    where, told, plain, ours = _segmented(s, count, k, 0.0, rows=LARGE, weigh=pause)
    _same(where, told, plain, ["x", *(f"layer {i}'s weight" for i in range(count))])
    said.append(weighed(pause, LARGE * WIDE * 8 + ours["kept"], plain["kept"] - ours["kept"]))
    return "; ".join(said)


def segments_peak(s: Session):
    for count, k, p in CASES[:3]:
        where, told, _, ours = _segmented(s, count, k, p)
        room = SLACK * ours["peak"] + k * STATE + 2 * ROWS * WIDE * 8  # two more tensors of a layer do not matter
        hint = "is a segment's work gone before the next one is run again?"
        expect(told["peak"] <= room, f"{where}: {told['peak']:,} bytes at the peak of backward, target {ours['peak']:,}", hint)


# --- selective ----------------------------------------------------------------------------------------------------------
B, S, H, HEADS = 2, 48, 32, 4
PARTS = ("project", "attend", "join", "mlp")


def _plainly(block, x):
    h = x + block.join(block.attend(*block.project(x)))
    return h + block.mlp(h)


def _selectively(s: Session, block, x):
    q, k, v = block.project(x)
    mixed = checkpoint(block.attend, q, k, v) if s.twist["part"] == "attend" else block.attend(q, k, v)
    h = x + block.join(mixed)
    return h + (checkpoint(block.mlp, h) if s.twist["part"] == "mlp" else block.mlp(h))


def _selected(s: Session, p, shape=(B, S, H), weigh=None):
    if (p, shape) not in s.remembered:
        h = shape[-1]
        shapes = ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
        tensors = [draw(s, *shape), *(draw(s, a, b) / a**0.5 for a, b in shapes)]
        c, seed = draw(s, *shape), s.dice.randrange(2**31)
        sizes = [s.dice.randrange(2, 6) for _ in range(3)]
        told = s.run(sizes, tensors[0], tensors[1:], HEADS, p, c, seed, limit=LIMIT, each=weigh).values[0]
        own_products(told["seen"], sizes)
        plain, ours = (
            _here(lambda own, calls, run=run: lambda: run(Block(own[1:], HEADS, p, calls), own[0]), tensors, c, seed)
            for run in (_plainly, lambda block, x: _selectively(s, block, x))
        )
        s.remembered[p, shape] = f"dropout {p}", told, plain, ours
    return s.remembered[p, shape]


def selective_values(s: Session):
    for p in (0.0, 0.25):
        where, told, plain, _ = _selected(s, p)
        _same(where, told, plain, ["x", "qkv", "out", "up", "down"])


def selective_calls(s: Session):
    for p in (0.0, 0.25):
        where, told, _, _ = _selected(s, p)
        for part in PARTS:
            runs, wanted = told["calls"].count(part), 2 if part == s.twist["part"] else 1
            hint = "what is inside of your checkpoint?" if runs > wanted else "what was to be forgotten?"
            expect(runs == wanted, f"{where}: {part} ran {runs} time{'s' if runs > 1 else ''}", hint)


def selective_kept(s: Session):
    where, told, plain, ours = _selected(s, 0.0)
    found, target = told["kept"], ours["kept"]
    hint = f"plainly it would be {plain['kept']:,}: which tensors of that part are still held?"
    expect(found <= SLACK * target, f"{where}: {found:,} bytes live after forward, target {target:,}", hint)
    shape = (2, 768, 64) if s.twist["part"] == "attend" else (3072, 8, 32)  # what that part makes is large
    pause = Pause(s.apart.pid)
    where, told, more, less = _selected(s, 0.0, shape, pause)
    _same(where, told, more, ["x", "qkv", "out", "up", "down"])
    leaves = 8 * (math.prod(shape) + 12 * shape[-1] ** 2)
    large = weighed(pause, leaves + less["kept"], more["kept"] - less["kept"])
    return f"{found / 1e3:.0f} kB instead of {plain['kept'] / 1e3:.0f}; {large}"
