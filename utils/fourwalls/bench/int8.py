"""True int8 beside fp32, bf16 and fake quantization: a linear layer on one thread, conversions included.

Each form takes float32 inputs and gives float32 outputs, so what it costs to quantise before and to dequantise after is in its
time. Forms and peer run in alternating pairs on one thread, in processor time, which leaves out what other programs take. Speed
is decided by what the processor has: the machine's record lists its instructions for dot products of bytes.

    time_ratio = time of the form / time of fp32 (bf16);     1 / time_ratio times as fast

Reference: torch._int_mm; oneDNN; trial f08 (a quantised model slower than fp32).
"""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ..numerics import onednn
from ..numerics.int8 import GRID, ROWS, linear_in_blocks
from ..numerics.product import LONGEST_FLOAT, dot_instructions, int_product
from ..numerics.quantize import fake_quantize, quantize
from .record import Row
from .timer import alternate, spread, time_ratio

__all__ = ["FORMS", "SHAPES", "Case", "describe", "exact_shapes", "rows"]

describe = "true int8 linear layer beside fp32, bf16 and fake quantization, conversions included; where it loses"
# (rows of x, inputs, outputs); the last three are small or thin: conversions, or the call itself, decide
SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (1, 64, 32), (200, 100, 60000), (1, 100, 60000))
LARGE = 2**28  # multiplications beyond which a shape has all its forms measured
SLOW = 2.0  # seconds a call, from which on two pairs must do
BESIDE_BF16 = ("blocks", "onednn")


class Case:
    """Inputs and weights of one shape, and every form of the layer as a function without arguments.

    Built with float64 beside it, so that each form can be checked: the integer sums exactly, the outputs within their bound.
    """

    def __init__(self, m: int, k: int, n: int):
        dice = torch.Generator().manual_seed(m + k + n)
        self.x, self.w = torch.randn(m, k, generator=dice), torch.randn(n, k, generator=dice) / k**0.5
        self.x16, self.w16 = self.x.bfloat16(), self.w.bfloat16()
        self.wq = quantize(self.w, 8, 0)
        self.values, self.scale = self.wq.values, self.wq.scale
        self.xq = quantize(self.x, 8, 0)
        self.packed = onednn.pack(self.values) if onednn.is_available() else None
        self.forms: dict[str, Callable] = {
            "blocks": lambda: self.true(rows=ROWS),
            "at once": lambda: self.true(rows=None),
            "product": lambda: int_product(self.xq.values, self.values),
            "float32 sums": lambda: self.true(rows=ROWS, how="float32"),
            "onednn": lambda: onednn.linear_onednn(self.x, self.packed, self.scale.flatten()),
            "fake": lambda: F.linear(fake_quantize(self.x, 8, 0), fake_quantize(self.w, 8, 0)),
            "fake once": lambda: F.linear(fake_quantize(self.x, 8, 0), self.wq_float),
        }
        self.wq_float = self.wq.dequantize()
        self.peers = {"fp32": lambda: F.linear(self.x, self.w), "bf16": lambda: F.linear(self.x16, self.w16)}

    def true(self, **options):
        return linear_in_blocks(self.x, self.values, self.scale, **options)

    def right(self, form: str) -> bool:
        """Whether a form's result is what float64 says of the same integers, on up to 64 rows spread over all."""
        rows = torch.linspace(0, len(self.x) - 1, min(64, len(self.x))).long()
        sums = self.xq.values[rows].double() @ self.values.double().t()
        found = self.forms[form]()[rows].double()
        if form == "product":
            return torch.equal(found, sums)
        exact = sums * self.xq.scale[rows].double() * self.scale.double().t()
        if form == "onednn":  # its inputs may have 7 bits: half a step of each, at most
            step = self.xq.scale[rows].double() * (127 / (2 ** (onednn.bits_of_inputs() - 1) - 1) + 1) / 2
            bound = step * (self.values.abs().double() * self.scale.double()).sum(1)
        else:
            k = self.x.shape[1]
            size = self.xq.values[rows].double().abs() @ self.values.double().abs().t()
            bound = size * self.xq.scale[rows].double() * self.scale.double().t() * (k + 4) * 2.0**-24
        return bool(((found - exact).abs() <= bound + 1e-30).all())


FORMS = (
    "blocks",
    "at once",
    "product",
    "float32 sums",
    "onednn",
    "fake",
    "fake once",
)


def rows(options, say: Callable[[str], None] = lambda text: None, *, shapes=SHAPES, tried: int = 1000) -> Iterator[Row]:
    """For each shape and form: time beside fp32, and, for true int8 on the large shapes, beside bf16; before that, exactness.

    `tried`: random shapes whose integer products must be exact. `options.algorithms` chooses among FORMS. One thread, whatever
    torch had before. ValueError for an unknown form.
    """
    wanted = options.algorithms or list(FORMS)
    unknown = [name for name in wanted if name not in FORMS]
    if unknown:
        raise ValueError(f"no form {unknown[0]!r}; there are {', '.join(FORMS)}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    machine = {"threads": 1, "dot_instructions": list(dot_instructions()), "clock": "processor time"}
    machine |= {"onednn_input_bits": onednn.bits_of_inputs()} if onednn.is_available() else {}
    try:
        say(f"int8, {tried} random shapes")
        wrong = exact_shapes(tried)
        case = {"shapes": tried, "product": "int32"}
        yield Row(benchmark="int8", case=case, metric="wrong", value=wrong, unit="", ok=wrong == 0, machine=machine)
        for shape in shapes:
            case = Case(*shape)
            for form in wanted:
                if form == "onednn" and case.packed is None:
                    continue
                say(f"int8, {'x'.join(map(str, shape))}, {form}")
                yield from _rows_of(case, shape, form, options.pairs, machine)
    finally:
        torch.set_num_threads(before)


def _rows_of(case: Case, shape, form: str, pairs: int, machine: dict) -> Iterator[Row]:
    m, k, n = shape
    work = case.forms[form]
    start = time.process_time()
    right = case.right(form)  # a call, checked, which also warms up
    slow = time.process_time() - start > SLOW
    for peer in case.peers if m * k * n >= LARGE and form in BESIDE_BF16 else ("fp32",):
        theirs = case.peers[peer]
        theirs()
        once = _seconds(theirs)
        few = slow or once > SLOW
        repeats = 1 if few else max(1, min(50, round(2e-3 / max(once, 1e-7))))
        ours, other = alternate(work, theirs, min(2, pairs) if few else pairs, repeats=repeats, clock=time.process_time)
        taken, ratio = spread(ours), time_ratio(ours, other)
        yield Row(
            benchmark="int8",
            case={"m": m, "k": k, "n": n, "form": form, "peer": peer},
            metric="time",
            value=taken.value,
            unit="s",
            low=taken.low,
            high=taken.high,
            pairs=taken.count,
            peer=f"{peer} linear",
            time_ratio=ratio.value,
            time_ratio_low=ratio.low,
            time_ratio_high=ratio.high,
            ok=right,
            machine=machine,
        )


def _seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def exact_shapes(count: int, *, seed: int = 0, largest: int = 70) -> int:
    """How many of `count` random products (m, k) (k, n), every third with an empty, odd or one-row side, are wrong anywhere.

    Each is made both ways, by the integer kernel and through float32, with the largest values among the random ones.
    """
    dice = torch.Generator().manual_seed(seed)
    wrong = 0
    for number in range(count):
        m, k, n = (int(v) for v in torch.randint(0 if number % 3 == 0 else 1, largest, (3,), generator=dice))
        if number % 7 == 0:
            m = 1
        if number % 50 == 1:
            k += LONGEST_FLOAT  # more than one block of the float32 form
        a = torch.randint(-128, GRID.high + 1, (m, k), dtype=torch.int8, generator=dice)
        b = torch.randint(-128, GRID.high + 1, (n, k), dtype=torch.int8, generator=dice)
        if number % 5 == 0 and a.numel() and b.numel():
            a[0], b[0] = -128, -128
        if number % 11 == 0 and m == 1:
            a = a.as_strided((1, k), (0, 1))
        right = a.to(torch.int32) @ b.to(torch.int32).t()
        found = [int_product(a, b, how=how) for how in ("integer", "float32")]
        wrong += any(f.dtype != torch.int32 or not torch.equal(f, right) for f in found)
    return wrong
