"""Precision measured: products in 16 bits beside fp32, what a conversion costs, and a mixed step beside fp32's and torch's.

Whether 16 bits are fast is a question to the processor: each row says which instructions it has. Without them torch's 16-bit
products are many times slower than fp32's, and the step shows that; rounding over fp32 arithmetic gives the same numbers.

    time_ratio = our time / the peer's;    a product of n x n: 2 n^3 FLOPs

Reference: torch.amp; oneDNN, "data types".
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..nn.gpt import GPT, GPTConfig
from ..nn.optim import Adam
from ..nn.text import batch
from ..numerics.autocast import Autocast
from ..numerics.formats import get_format
from ..numerics.mixed import MasterWeights, lower
from ..numerics.rounding import round_to
from .instructions import instructions
from .precision_study import PrecisionStudy, summary
from .record import Row
from .timer import alternate, spread, time_ratio

__all__ = ["describe", "rows"]

describe = "products in 16 bits, conversions, a mixed training step beside fp32's and torch.amp's, one thread"
SIZES = (256, 512)


def rows(
    options,
    say: Callable[[str], None] = lambda text: None,
    *,
    sizes=SIZES,
    config: GPTConfig | None = None,
    study: PrecisionStudy | None = None,
) -> Iterator[Row]:
    """Rows of four kinds: "product" for each n and format, "conversion" to each format, "step" for each way to train; and how
    far bf16's held-out loss is from fp32's, over three seeds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _products(options, say, sizes)
        yield from _conversions(options, say)
        yield from _steps(options, say, config)
        yield from summary(study or PrecisionStudy(), say=say)
    finally:
        torch.set_num_threads(threads)


def _row(case: dict, ours: list[float], theirs: list[float], peer: str, ok: bool) -> Row:
    taken, ratio = spread(ours), time_ratio(ours, theirs)
    return Row(
        benchmark="precision",
        case=case,
        metric="time",
        value=taken.value,
        unit="s",
        low=taken.low,
        high=taken.high,
        pairs=len(ours),
        peer=peer,
        time_ratio=ratio.value,
        time_ratio_low=ratio.low,
        time_ratio_high=ratio.high,
        ok=ok,
        machine={"instructions": instructions()},
    )


def _products(options, say, sizes) -> Iterator[Row]:
    dice = torch.Generator().manual_seed(0)
    for n in sizes:
        x, w = (torch.randn(n, n, generator=dice) for _ in range(2))
        exact = x.double() @ w.double()
        size = x.double().abs() @ w.double().abs()
        for name in ("bf16", "fp16"):
            say(f"precision, product of {n} x {n} in {name}")
            f = get_format(name)
            a, b = x.to(f.dtype), w.to(f.dtype)
            # two roundings of the inputs, one of the result, and n additions in fp32 (in bf16 where the kernel is poor)
            bound = (2 * f.epsilon + n * 2**-23) * size + f.epsilon * exact.abs()
            ok = bool(((a @ b).double() - exact).abs().le(bound).all())
            ours, theirs = alternate(partial(torch.matmul, a, b), partial(torch.matmul, x, w), options.pairs)
            yield _row({"what": "product", "n": n, "format": name}, ours, theirs, "fp32", ok)


def _conversions(options, say, numel: int = 2**20) -> Iterator[Row]:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    for name in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        say(f"precision, conversion to {name}")
        dtype = get_format(name).dtype
        ok = torch.equal(round_to(x, name), x.to(dtype).float())
        cast = partial(_there_and_back, x, dtype)
        ours, theirs = alternate(cast, x.clone, options.pairs, repeats=4)
        yield _row({"what": "conversion there and back", "n": numel, "format": name}, ours, theirs, "a copy in fp32", ok)
        ours, theirs = alternate(partial(round_to, x, name), cast, max(options.pairs // 4, 1))
        yield _row({"what": "round_to", "n": numel, "format": name}, ours, theirs, "torch's cast there and back", ok)


def _there_and_back(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).float()


class _Step:
    """One training step of a small GPT, one way; `loss` is the first step's."""

    def __init__(self, config: GPTConfig, way: str):
        self.model, self.way = GPT(config), way
        self.inputs = batch(0, 0, 0, batch=4, length=config.length)
        if way == "16-bit weights, fp32 masters":
            lower(self.model)
            self.optimizer = MasterWeights(self.model.parameters(), partial(Adam, lr=1e-3))
        else:
            self.optimizer = Adam(self.model.parameters(), lr=1e-3)
        self.loss = self()

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        region = {
            "autocast, native": partial(Autocast, "bf16"),
            "autocast as torch's": partial(Autocast, "bf16", table="cpu"),
            "autocast, rounding over fp32": partial(Autocast, "bf16", arithmetic="float32"),
            "torch.autocast": partial(torch.autocast, "cpu", torch.bfloat16),
        }.get(self.way)
        if region is None:
            loss = self.model.loss(*self.inputs)
        else:
            with region():
                loss = self.model.loss(*self.inputs)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _steps(options, say, config: GPTConfig | None) -> Iterator[Row]:
    config = config or GPTConfig()  # where 16 bits are slow, a larger one would take minutes
    pairs = max(options.pairs // 2, 1)
    fp32, theirs = _Step(config, "fp32"), _Step(config, "torch.autocast")
    for way in (
        "autocast, rounding over fp32", "autocast, native", "autocast as torch's", "16-bit weights, fp32 masters",
    ):  # fmt: skip
        say(f"precision, step: {way}")
        ours = _Step(config, way)
        # a dozen roundings of 2^-9 on logits below 1
        ok = abs(ours.loss - fp32.loss) < 12 * 2**-9 and (way != "autocast as torch's" or ours.loss == theirs.loss)
        case = {"what": "step", "parameters": sum(p.numel() for p in ours.model.parameters()), "way": way}
        for peer, step in (("fp32", fp32), ("torch.amp", theirs)):
            yield _row(case | {"beside": peer}, *alternate(ours, step, pairs), peer, ok)
