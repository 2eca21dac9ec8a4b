"""A GPT's bytes by category: measured by the ledger, beside the formula, with whatever is left unexplained as a line of its own.

Two moments of a step are looked at: the end of forward, when everything that is kept is there, and the peak. The formulas are
those of cost/memory.py; what they leave out is named (statistics of norms, the loss's count, random states of recomputed
blocks). Nothing is tuned until it fits: a difference shows.

    measured = sum of formulas + unexplained

Reference: Korthikanti et al. 2022 (arXiv:2205.05198), Table 2; Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..cost.memory import end_activations, layer_activations
from ..memory.ledger import Ledger
from ..memory.recompute import recompute_model
from ..nn.gpt import GPT, GPTConfig
from ..nn.optim import SGD, Adam
from .record import Row

__all__ = ["Account", "Line", "describe", "explain", "rows"]

describe = "a GPT's bytes by category beside the formula, for each optimizer and recomputation; the rest as 'unexplained'"
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}  # numbers that the optimizer keeps for each parameter
RANDOM_STATE = 5056  # bytes of a CPU generator's state


class Line(NamedTuple):
    """Bytes of one category (or "unexplained", whose formula is None), as computed and as measured."""

    name: str
    formula: int | None
    measured: int


class Account(list):
    """Lines of one moment; `total`: all live bytes then; `peak`: the most in the step."""

    def __init__(self, lines, total: int, peak: int):
        super().__init__(lines)
        self.total, self.peak = total, peak


def explain(config: GPTConfig, *, batch: int, optimizer: str = "adam", recompute: str = "none", dtype=torch.float32) -> Account:
    """The second step of a GPT on this CPU, at the end of its forward: gradients of the first are still there."""
    if optimizer not in MOMENTS:
        raise ValueError(f"optimizer is {optimizer!r}; allowed: {', '.join(MOMENTS)}")
    model = recompute_model(GPT(config, dtype=dtype), recompute)
    params = list(model.parameters())
    steps = Adam(params) if optimizer == "adam" else SGD(params, momentum=0.9 if optimizer == "momentum" else 0.0)
    tokens = torch.zeros(batch, config.length, dtype=torch.int64)
    model.loss(tokens, tokens).backward()
    steps.step()
    with Ledger(model, steps, inputs=[tokens], lines=False) as ledger:
        ledger.phase("forward")
        loss = model.loss(tokens, tokens)
        ledger.phase("backward")
        loss.backward()
        ledger.phase("optimizer")
        steps.step()
    measured = ledger.story().at("forward")
    expected = formula(config, batch, optimizer, recompute, dtype.itemsize)
    lines = [Line(name, nbytes, measured.bytes[name]) for name, nbytes in expected.items()]
    lines.append(Line("unexplained", None, measured.total - sum(expected.values())))
    return Account(lines, measured.total, ledger.peak)


def formula(config: GPTConfig, batch: int, optimizer: str, recompute: str, element: int) -> dict[str, int]:
    """category -> bytes at the end of forward."""
    shape, dropout, tokens = config.shape(), config.dropout > 0, batch * config.length
    states = element * shape.parameter_count
    layers = layer_activations(shape, batch, dropout=dropout, recompute=recompute, element=element, flash=config.fused).total
    ends = end_activations(shape, batch, dropout=dropout, element=element).total
    norms = 1 if recompute == "full" else 2 * config.layers + 1  # each keeps a mean and 1 / deviation for every token
    drawn = config.layers * RANDOM_STATE if recompute != "none" and dropout else 0
    return {
        "parameters": states,
        "gradients": states,
        "optimizer": MOMENTS[optimizer] * states,
        "activations": config.layers * layers + ends + norms * 2 * element * tokens + 4,  # 4: the number of tokens
        "inputs": 8 * tokens,
        "temporary": 4 + drawn,  # the loss; random states of blocks that are run again
    }


def rows(options, say: Callable[[str], None] = lambda text: None, *, config: GPTConfig | None = None) -> Iterator[Row]:
    """For each optimizer and recomputation: measured bytes of each category beside the formula, the peak, what is unexplained."""
    config = config or GPTConfig(width=128, heads=4, length=128, layers=4, dropout=0.1)
    for optimizer, recompute, batch in [
        *((name, "none", 4) for name in MOMENTS),
        *(("adam", how, 4) for how in ("selective", "full")),
        ("adam", "none", 8),
    ]:
        say(f"memory, {optimizer}, recompute {recompute}, batch {batch}")
        account = explain(config, batch=batch, optimizer=optimizer, recompute=recompute)
        case = {"optimizer": optimizer, "recompute": recompute, "batch": batch, "length": config.length, "dtype": "float32"}
        here = {"benchmark": "memory", "case": case, "unit": "B"}
        for line in account[:-1]:
            ratio = line.measured / line.formula if line.formula else None
            ok = line.measured == line.formula
            yield Row(metric=line.name, value=line.measured, peer="formula", time_ratio=ratio, ok=ok, **here)
        yield Row(metric="unexplained", value=account[-1].measured, **here)
        yield Row(metric="peak", value=account.peak, **here)
