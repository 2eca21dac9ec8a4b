"""Fusion measured: operators that are done separately, in row blocks that stay in a cache, and compiled, with the bytes of each.

Five chains of operators, at 8 million numbers, each form beside the separate operators and checked against float64; then
attention in whole matrices beside tiles and torch's own, with the peak of live bytes by the length of the sequence. One thread,
in processor time, which leaves out what other programs take. What compiling took is a row of its own.
Large results are made in memory fresh from the system, which takes time of its own; "softmax in kept memory" leaves it out.

    time_ratio = time of the form / time of the separate operators (of plain attention)

Reference: torch.compile; torch.nn.functional.scaled_dot_product_attention; kernels/formulas.py for the bytes.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from ..kernels import formulas
from ..kernels.attention import peak_bytes, plain_attention, tiled_attention
from ..kernels.compile import Compiled, compiler
from ..kernels.cross_entropy import cross_entropy_blocks, cross_entropy_in_place, cross_entropy_separate
from ..kernels.fusion import (
    bias_gelu_blocks,
    bias_gelu_separate,
    dropout_residual_blocks,
    dropout_residual_separate,
)
from ..kernels.norm import layer_norm_blocks, layer_norm_online, layer_norm_separate
from ..kernels.rows import BLOCK_BYTES, rows_that_fit
from ..kernels.softmax import softmax_blocks, softmax_online, softmax_separate
from ..kernels.traffic import traffic
from .record import Row
from .timer import alternate, spread, time_ratio

__all__ = ["ATTENTION", "FORMS", "Case", "bound", "describe", "kept_softmax", "right", "rows"]

describe = "softmax, layer norm, GELU, dropout, cross-entropy: operators, row blocks, compiled; tiled attention by length"
FORMS = ("separate", "row blocks", "online", "compiled", "torch's own")
ATTENTION = ("plain", "tiled", "torch's own")
CACHE = 2**20  # bytes of the modelled cache in which row blocks are counted
P = 0.1  # share that dropout drops


class Case:
    """Inputs of one operator, and every form of it as a function without arguments; `exact` is what float64 says of `sample`."""

    def __init__(self, operator: str, count: int, columns: int):
        dice = torch.Generator().manual_seed(columns)
        self.operator, self.count, self.columns = operator, count, columns
        self.x = torch.randn(count, columns, generator=dice)
        self.other = torch.randn(count, columns, generator=dice) if operator == "dropout_residual" else None
        self.x.requires_grad_(operator == "dropout_residual")  # else nobody needs the mask
        self.w, self.b = (torch.randn(columns, generator=dice) for _ in range(2))
        self.labels = torch.randint(columns, (count,), generator=dice)
        self.inputs: tuple = {
            "softmax": (self.x,),
            "layer_norm": (self.x, self.w, self.b),
            "bias_gelu": (self.x, self.b),
            "dropout_residual": (self.x, self.other, P),
            "cross_entropy": (self.x, self.labels),
        }[operator]
        self.forms: dict[str, Callable] = {
            "softmax": {
                "separate": softmax_separate,
                "row blocks": softmax_blocks,
                "online": softmax_online,
                "torch's own": partial(torch.softmax, dim=-1),
            },
            "layer_norm": {
                "separate": layer_norm_separate,
                "row blocks": layer_norm_blocks,
                "online": layer_norm_online,
                "torch's own": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
            },
            "bias_gelu": {
                "separate": bias_gelu_separate,
                "row blocks": bias_gelu_blocks,
                "torch's own": lambda x, b: F.gelu(x + b, approximate="tanh"),
            },
            "dropout_residual": {
                "separate": dropout_residual_separate,
                "row blocks": dropout_residual_blocks,
                "torch's own": lambda x, other, p: other + F.dropout(x, p),
            },
            "cross_entropy": {
                "separate": cross_entropy_separate,
                "row blocks": cross_entropy_blocks,
                "torch's own": F.cross_entropy,
            },
        }[operator]

    def bytes_of(self, form: str) -> tuple[int, bool]:
        """(bytes of one call, whether count and formula agree). Fused kernels show no operators: there it is the formula's."""
        size = self.x.element_size()
        one = formulas.one_pass_bytes(self.operator, self.count, self.columns, itemsize=size)
        if form == "separate":
            counted = traffic(self.forms[form], *self.inputs).bytes
            return counted, counted == formulas.separate_bytes(self.operator, self.count, self.columns, itemsize=size)
        if form in ("row blocks", "online"):
            counted = traffic(self.forms[form], *self.inputs, cache=CACHE).bytes
            return counted, counted == one
        return one, True


def bound(terms: int) -> float:
    """How far a right number may be off, in units of its size: float32, a sum over `terms`, a few operations more."""
    return 4 * (terms + 32) * 2**-24


def right(case: Case, form: Callable) -> bool:
    """Whether a form's result is what float64 says, on up to 64 rows spread over all (for a loss: on all of them)."""
    most = bound(case.columns)
    if case.operator == "cross_entropy":
        exact = F.cross_entropy(case.x.double(), case.labels)
        return bool((form(*case.inputs).double() - exact).abs() <= most * (1 + exact))
    pick = torch.linspace(0, case.count - 1, min(64, case.count)).long()
    found, x = form(*case.inputs)[pick].double(), case.x[pick].double()
    if case.operator == "dropout_residual":  # each form has its own noise: dropped or scaled, and the right share
        other = case.other[pick].double()
        limit = bound(0) * (x.abs() + other.abs())
        kept, dropped = (found - (other + x / (1 - P))).abs() <= limit, (found - other).abs() <= limit
        share, deviation = dropped.double().mean(), (P * (1 - P) / dropped.numel()) ** 0.5
        return bool((kept | dropped).all() and abs(share - P) < 6 * deviation)
    exact = {
        "softmax": lambda: torch.softmax(x, -1),
        "layer_norm": lambda: F.layer_norm(x, (case.columns,), case.w.double(), case.b.double()),
        "bias_gelu": lambda: F.gelu(x + case.b.double(), approximate="tanh"),
    }[case.operator]()
    return bool(((found - exact).abs() <= most * exact.abs().clamp_min(0 if case.operator == "softmax" else 1)).all())


def rows(
    options, say: Callable[[str], None] = lambda text: None, *, numel: int = 2**23, columns: int = 1024, lengths=(512, 1024, 2048)
) -> Iterator[Row]:
    """For each operator and form: bytes, time beside the separate operators, and what compiling took; then attention by length.

    `options.algorithms` chooses among FORMS and ATTENTION. One thread, whatever torch had before. ValueError for an unknown form.
    """
    known = tuple(dict.fromkeys((*FORMS, *ATTENTION)))
    wanted = options.algorithms or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no form {unknown[0]!r}; there are {', '.join(known)}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for operator in formulas.OPERATORS:
            case = Case(operator, numel // columns, columns)
            for form in FORMS:
                if form in wanted and (form in case.forms or form == "compiled"):
                    say(f"fusion, {operator}, {form}")
                    yield from _of_form(case, form, options.pairs, say)
            if operator == "softmax":
                yield from _kept(case, options.pairs, wanted, say)
        yield from _gradient(numel // columns, columns, options.pairs, wanted, say)
        for length in lengths:
            yield from _attention(length, max(options.pairs // 3, 2), wanted, say)
    finally:
        torch.set_num_threads(threads)


def _row(case: dict, metric: str, value, unit: str, **rest) -> Row:
    machine = {"threads": 1, "clock": "processor time", "block_bytes": BLOCK_BYTES}
    return Row(benchmark="fusion", case=case, metric=metric, value=value, unit=unit, machine=machine, **rest)


def _timed(case: dict, work: Callable, peer: Callable, name: str, pairs: int, ok: bool) -> Row:
    work(), peer()  # warm
    ours, theirs = alternate(work, peer, pairs, clock=time.process_time)
    taken, ratio = spread(ours), time_ratio(ours, theirs)
    return _row(
        case, "time", taken.value, "s", low=taken.low, high=taken.high, pairs=pairs, peer=name, ok=ok,
        time_ratio=ratio.value, time_ratio_low=ratio.low, time_ratio_high=ratio.high,
    )  # fmt: skip


def _of_form(case: Case, form: str, pairs: int, say) -> Iterator[Row]:
    what = {"operator": case.operator, "rows": case.count, "columns": case.columns, "form": form}
    separate = case.forms["separate"]
    if form == "compiled":
        if compiler() is None:
            return
        work = Compiled(separate, say=say, fresh=True)
        work(*case.inputs)
        if work.fell_back:
            return
        yield _row(what, "compile_time", work.seconds, "s")
    else:
        work = case.forms[form]
    moved, agrees = case.bytes_of(form)
    yield _row(what, "bytes", moved, "B", source="measured" if form == "separate" else "modelled", ok=agrees)
    ok = right(case, work)
    yield _timed(what, partial(work, *case.inputs), partial(separate, *case.inputs), "separate operators", pairs, ok)


def kept_softmax(x: torch.Tensor, *, say: Callable[[str], None] = print) -> dict[str, Callable]:
    """{form: softmax of x (r, n) into a result that is there already}, each a function without arguments, which returns it.

    A result of 32 MiB comes fresh from the system, which clears each page when it is first touched, in every call. In a training
    step the same sizes come again and again, and an allocator that keeps its memory (a GPU's always does) pays that once; then a
    kernel costs what it moves and computes. So here nothing is allocated: "separate" writes each operator's result into memory of
    its own, as such an allocator would hand it out. "arithmetic alone" does all blocks of rows on one block, which never leaves
    the cache (it gives no softmax of x): no blocking can be faster. "compiled" is left out where nothing can be compiled.
    """
    out, below, weights = (torch.empty_like(x) for _ in range(3))
    largest, total = (x.new_empty(len(x), 1) for _ in range(2))

    def separate():
        torch.amax(x, -1, keepdim=True, out=largest)
        torch.sub(x, largest, out=below)
        torch.exp(below, out=weights)
        torch.sum(weights, -1, keepdim=True, out=total)
        return torch.div(weights, total, out=out)

    def arithmetic():
        block = rows_that_fit(x.shape[1], x.element_size())
        for _ in range(-(-len(x) // block)):
            softmax_blocks(x[:block], out=out[:block])
        return out

    forms = {
        "separate": separate,
        "row blocks": partial(softmax_blocks, x, out=out),
        "online": partial(softmax_online, x, out=out),
        "arithmetic alone": arithmetic,
        "torch's own": partial(torch.softmax, x, -1, out=out),
    }
    if compiler() is not None:
        into = Compiled(_softmax_into, say=say, fresh=True)
        into(x, out)
        if not into.fell_back:
            forms["compiled"] = lambda: into(x, out)
    return forms


def _softmax_into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(softmax_separate(x))


def _kept(case: Case, pairs: int, wanted, say) -> Iterator[Row]:
    say("fusion, softmax in kept memory")
    forms = kept_softmax(case.x, say=say)
    for form, work in forms.items():
        if form in wanted or (form == "arithmetic alone" and "row blocks" in wanted):
            what = {"operator": "softmax in kept memory", "rows": case.count, "columns": case.columns, "form": form}
            ok = form == "arithmetic alone" or right(case, lambda x, work=work: work())
            yield _timed(what, work, forms["separate"], "separate operators", pairs, ok)


def _gradient(count: int, columns: int, pairs: int, wanted, say) -> Iterator[Row]:
    """Cross-entropy with its gradient: where the three forms differ in what they keep."""
    case = Case("cross_entropy", count, columns)
    leaf = case.x.clone().requires_grad_()
    softmax = torch.softmax(case.x.double(), -1)
    exact = (softmax - F.one_hot(case.labels, columns)) / count

    def gradient(fn, x):
        return torch.autograd.grad(fn(x, case.labels), x)[0]

    ways = {
        "separate": cross_entropy_separate,
        "row blocks": cross_entropy_blocks,
        "in place": cross_entropy_in_place,
        "torch's own": F.cross_entropy,
    }
    for form, fn in ways.items():
        if form not in (*wanted, "in place"):
            continue
        say(f"fusion, cross-entropy with its gradient, {form}")
        what = {"operator": "cross_entropy and gradient", "rows": count, "columns": columns, "form": form}
        x = case.x.clone().requires_grad_()
        limit = bound(columns) * softmax / count + bound(0) / count
        ok = bool(((gradient(fn, x) - exact).abs() <= limit).all())
        peak = peak_bytes(lambda x, fn=fn: fn(x, case.labels), case.x.clone(), backward=True)
        yield _row(what, "peak_bytes", peak, "B")
        separate = partial(gradient, cross_entropy_separate, leaf)
        yield _timed(what, partial(gradient, fn, x), separate, "separate operators", pairs, ok)


def _attention(length: int, pairs: int, wanted, say, *, heads: int = 4, d: int = 64) -> Iterator[Row]:
    dice = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, heads, length, d, generator=dice).requires_grad_() for _ in range(3))
    up = torch.randn(1, heads, length, d, generator=dice)
    ways = {
        "plain": plain_attention,
        "tiled": tiled_attention,
        "torch's own": partial(F.scaled_dot_product_attention, is_causal=True),
    }
    with torch.no_grad():
        exact = plain_attention(*(x.detach().double() for x in (q, k, v)))

    def forward(fn):
        with torch.no_grad():
            return fn(q, k, v)

    def both(fn):
        return torch.autograd.grad(fn(q, k, v), (q, k, v), up)

    for form in ATTENTION:
        if form not in wanted:
            continue
        fn = ways[form]
        for way, work in (("forward", forward), ("forward and backward", both)):
            say(f"fusion, attention over {length}, {form}, {way}")
            what = {"what": "causal attention", "heads": heads, "d": d, "s": length, "way": way, "form": form}
            yield _row(what, "peak_bytes", peak_bytes(fn, q, k, v, backward=work is both), "B")
            ok = bool(((forward(fn).double() - exact).abs() <= bound(length + d) * v.detach().abs().max()).all())
            yield _timed(what, partial(work, fn), partial(work, plain_attention), "plain attention", pairs, ok)
