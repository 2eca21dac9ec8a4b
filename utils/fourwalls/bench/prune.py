"""Which zeros save time? A GPT with half of its weights zero, in three ways, beside itself; then what zeros cost in quality.

Single zeros and 2:4 leave every shape as it was, so a dense product takes as long as before. Heads and neurons that are removed
make tensors smaller, and the time follows the FLOPs. Stored as a list of what is not zero (CSR), a weight needs far more zeros
than half to win. One thread, alternating pairs, processor time.

    speed-up = median over pairs of (dense time / pruned time);      predicted = FLOPs dense / FLOPs pruned

Reference: Mishra et al. 2021 (arXiv:2104.08378); Hoefler et al. 2021 (arXiv:2102.00554), on what hardware makes of zeros.
"""

import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ..nn.gpt import GPT, GPTConfig
from ..numerics.prune import predicted_speedup, prune_masks, shrink
from .distill_study import TextStudy, text_students
from .prune_study import PruneStudy, of_seed, summary
from .record import Row
from .timer import alternate, spread, time_ratio

__all__ = ["CSR_SHARES", "FORMS", "PruneCase", "csr_product", "describe", "of_text", "rows", "speed"]

describe = "a GPT with half of its weights zero: single zeros, 2:4, heads and neurons; quality; distilled students"
FORMS = ("unstructured", "2:4", "structured")
CONFIG = {"width": 512, "layers": 2, "heads": 8, "length": 64}
CSR_SHARES = (0.5, 0.9, 0.99)
TEXTS = (TextStudy(), TextStudy(windows=None), TextStudy(temperature=2.0))


class PruneCase:
    """A dense GPT and its three pruned forms, each a model.

    Half of its heads and neurons write zeros and are the ones removed: the small model must give what the dense one gives.
    """

    def __init__(self, *, batch: int = 4, **sizes):
        self.dense = GPT(GPTConfig(**(CONFIG | sizes))).eval()
        length = self.dense.config.length
        self.tokens = torch.arange(batch * length).mul_(7).remainder_(256).view(batch, length)
        with torch.no_grad():
            for block in self.dense.blocks:
                block.mlp.down.weight[:, 1::2] = 0
                bands = block.attention.output.weight.unflatten(1, (block.attention.heads, -1))
                bands[:, 1::2] = 0
        self.forms = {"structured": shrink(self.dense, 0.5)}
        for form in ("unstructured", "2:4"):
            self.forms[form] = GPT(self.dense.config).eval()  # with the first weights: no zeros but those of the mask
            prune_masks(_weights(self.forms[form]), 0.5, pattern=form).apply_()

    @torch.no_grad()
    def run(self, form: str = "dense") -> torch.Tensor:
        return (self.dense if form == "dense" else self.forms[form])(self.tokens)

    def right(self, form: str) -> bool:
        """Structured: the dense model's logits, within what float32 loses. Masks: exactly half zero, two in each four for 2:4."""
        logits = self.run(form)
        if form == "structured":
            return bool((logits - self.run()).abs().max() <= 1e-4 * logits.abs().max())
        found = bool(torch.isfinite(logits).all())
        for weight in _weights(self.forms[form]).values():
            pieces = weight.unflatten(-1, (-1, 4)) if form == "2:4" else weight.flatten()
            found = found and bool((2 * (pieces == 0).sum(-1) == pieces.shape[-1]).all())
        return found

    def predicted(self, form: str) -> float:
        """FLOPs of the dense model / of this form."""
        return predicted_speedup(self.dense, self.forms[form], *self.tokens.shape)


def _weights(model: GPT) -> dict[str, torch.nn.Parameter]:
    """The weight matrices of all blocks by name: what is pruned."""
    return {name: p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}


def rows(
    options,
    say: Callable[[str], None] = lambda text: None,
    *,
    case: PruneCase | None = None,
    study: PruneStudy | None = None,
    texts: tuple[TextStudy, ...] | None = None,
    seeds=(1, 2, 3),
) -> Iterator[Row]:
    """For each form time beside dense, speed-up and its prediction; CSR products; then the studies over `seeds`.

    `options.algorithms` chooses among FORMS, "csr", "study" (digits) and "text" (distilled GPTs). One thread. ValueError for a
    word that does not exist.
    """
    known = (*FORMS, "csr", "study", "text")
    wanted = options.algorithms or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no form {unknown[0]!r}; there are {', '.join(known)}")
    seeds = getattr(options, "seeds", None) or seeds
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if any(name in FORMS for name in wanted):
            case = case or PruneCase()
        for form in (name for name in wanted if name in FORMS):
            say(f"prune, {form}")
            yield from speed(case, form, options.pairs)
        if "csr" in wanted:
            for share in CSR_SHARES:
                say(f"prune, CSR with {share:.0%} zeros")
                yield csr_product(share, options.pairs)
        if "study" in wanted:
            yield from summary([of_seed(seed, study or PruneStudy(), say) for seed in seeds])
        if "text" in wanted:
            yield from summary([of_text(seed, texts or TEXTS, say) for seed in seeds])
    finally:
        torch.set_num_threads(before)


def of_text(seed: int, studies: tuple[TextStudy, ...], say: Callable[[str], None]) -> dict[tuple[str, str], float]:
    """{(what, form): nats a byte} of one seed's teacher and its students, for each study; they share the teacher."""
    found = {}
    say(f"prune, teacher of seed {seed}")
    teacher = studies[0].teacher(seed)
    for study in studies:
        what = f"distilled GPT, {study.windows or 'all'} windows, temperature {study.temperature:g}"
        say(f"prune, {what}, seed {seed}")
        losses = text_students(teacher, study, seed)
        found |= {(what, form): value for form, value in losses.items()}
        found[what, "gain"] = losses["alone"] - losses["with teacher"]
    return found


def _time_row(case: dict, ours: list[float], theirs: list[float], peer: str, ok: bool) -> Row:
    taken, ratio = spread(ours), time_ratio(ours, theirs)
    ratios = {"time_ratio": ratio.value, "time_ratio_low": ratio.low, "time_ratio_high": ratio.high}
    spreads = {"value": taken.value, "low": taken.low, "high": taken.high, "pairs": taken.count}
    clock = {"threads": 1, "clock": "processor time"}
    return Row(benchmark="prune", case=case, metric="time", unit="s", peer=peer, ok=ok, machine=clock, **spreads, **ratios)


def speed(case: PruneCase, form: str, pairs: int) -> Iterator[Row]:
    """Three rows of one form: time, measured speed-up, predicted speed-up."""
    right, config = case.right(form), case.dense.config
    case.run()
    ours, theirs = alternate(lambda: case.run(form), case.run, pairs, clock=time.process_time)
    sizes = {"form": form, "width": config.width, "layers": config.layers, "tokens": case.tokens.numel()}
    taken = _time_row(sizes, ours, theirs, "dense", right)
    yield taken
    faster = spread(b / a for a, b in zip(ours, theirs, strict=True))
    here = {"benchmark": "prune", "case": sizes, "unit": "x", "ok": right, "machine": taken.machine}
    yield Row(metric="speed-up", value=faster.value, low=faster.low, high=faster.high, pairs=faster.count, **here)
    yield Row(metric="predicted", value=case.predicted(form), source="modelled", **here)


def csr_product(share: float, pairs: int, *, rows: int = 256, inputs: int = 512, outputs: int = 2048) -> Row:
    """One linear layer with `share` of zeros, its weight stored as CSR, beside the dense product of the same numbers."""
    dice = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows, inputs, generator=dice), torch.randn(outputs, inputs, generator=dice)
    prune_masks({"w": w}, share).apply_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        sparse = w.to_sparse_csr()
    turned = x.t().contiguous()  # a sparse weight stands on the left; turning is not timed
    exact, size = w.double() @ turned.double(), w.double().abs() @ turned.double().abs()
    ok = bool(((sparse @ turned).double() - exact).abs().le(inputs * 2.0**-24 * size).all())
    case = {"form": f"CSR, {share:.0%} zeros", "rows": rows, "inputs": inputs, "outputs": outputs}
    ours, theirs = alternate(lambda: sparse @ turned, lambda: F.linear(x, w), pairs, clock=time.process_time)
    return _time_row(case, ours, theirs, "dense product", ok)
