"""What rounding costs in quality: a byte GPT and a small conv net, trained here, several seeds, each form of quantization.

Everything is the difference to the same model in float32, on text and pictures that were held out. A figure is the mean over the
seeds, its low and high the smallest and the largest of them; where seeds disagree about an order, the spread shows it. Outlier
channels are put in by an exactly function-preserving rescale, since real ones appear only in models of billions of parameters.

    excess = loss(quantised) - loss(float32)   in nats a byte;      points = accuracy(quantised) - accuracy(float32)

Reference: GPTQ (arXiv:2210.17323), SmoothQuant (arXiv:2211.10438), LLM.int8() (arXiv:2208.07339), LSQ (arXiv:1902.08153).
"""

import copy
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..nn import text
from ..nn.gpt import GPT, GPTConfig
from ..numerics import digits as pictures
from ..numerics.convert import convert, watch_inputs
from ..numerics.fold import fold_model
from ..numerics.gptq import gptq, hessian
from ..numerics.int8 import FakeLinear, Int8Linear
from ..numerics.int8_training import int8_training
from ..numerics.kv_cache import rounded_core
from ..numerics.outliers import DecomposedLinear, inject, readers
from ..numerics.qat import prepare_qat
from ..numerics.quantize import quantize, zero_share
from ..numerics.smooth import migrate
from .descend import descend
from .record import Row

__all__ = [
    "Study",
    "calibration",
    "describe",
    "excess",
    "injected",
    "of_digits",
    "of_gpt",
    "rows",
    "summary",
    "train",
    "trained_in_int8",
    "weights_only",
]

describe = "quality of quantised models (a GPT on text, a conv net on digits), trained here with several seeds"
CHANNELS, FACTOR = (5, 40), 256.0  # of 64 channels


class Study:
    """Sizes of the study. Defaults: what `python -m fourwalls.bench quantize` records; a notebook or a test takes less."""

    def __init__(self, *, width=64, layers=2, length=32, batch=8, steps=2400, lr=1e-2, more=300, calm=400, windows=256, group=16):
        self.config = partial(GPTConfig, width=width, layers=layers, length=length, heads=4)
        self.length, self.batch, self.steps, self.lr = length, batch, steps, lr
        self.more, self.calm, self.windows, self.group = more, calm, windows, group

    def held_out(self):
        return text.batch(5, 0, batch=self.windows, length=self.length, split="held-out")


def train(model: GPT, study: Study, seed: int, *, steps: int, lr: float, first: int = 0, eps: float = 1e-8) -> GPT:
    """`steps` steps of AdamW, batches first, first + 1, ... of the training text; the rate rises, then falls to nearly 0."""
    draw = partial(text.batch, batch=study.batch, length=study.length)
    return descend(model, partial(GPT.loss, model), lambda step: draw(seed, first + step), steps=steps, lr=lr, eps=eps)


@torch.no_grad()
def loss(model: GPT, study: Study) -> float:
    """Nats a byte on the held-out text."""
    return float(model.loss(*study.held_out()))


def excess(model: GPT, study: Study, base: float, make: Callable | None = None, **options) -> float:
    """Loss of the model, with its linear layers replaced by `make`, beyond `base`."""
    return loss(model if make is None else convert(model, make, **options), study) - base


def calibration(model: GPT, study: Study, batches: int = 4) -> dict[str, torch.Tensor]:
    """The inputs of every linear layer on a few batches of the training text."""
    return watch_inputs(model, [text.batch(9, i, batch=32, length=study.length)[0] for i in range(batches)])


def weights_only(model: GPT, study: Study, base: float, inputs: dict, bits: int) -> dict[str, float]:
    """Excess with weights of `bits` bits: rounded per tensor, per channel, per group, and by GPTQ with the same groups."""
    forms = {"per tensor": {"w_axis": None}, "per channel": {"w_axis": 0}, "per group": {"w_group": study.group}}
    found = {
        name: excess(model, study, base, lambda layer, how=how: FakeLinear(layer, w_bits=bits, x_bits=None, **how))
        for name, how in forms.items()
    }

    def solved(layer, name):
        return FakeLinear(layer, x_bits=None, weight=gptq(layer.weight, hessian(inputs[name]), bits, group=study.group))

    return found | {"GPTQ, per group": excess(model, study, base, solved, named=True)}


def injected(model: GPT, study: Study, base: float) -> tuple[dict[str, float], dict[str, float]]:
    """(excess, share of inputs rounded to zero) of a model with outlier channels, for each way to round the inputs of 8 bits."""
    model = inject(copy.deepcopy(model), [c * model.config.width // 64 for c in CHANNELS], FACTOR)
    inputs = calibration(model, study)
    wide = {name: x for name, x in inputs.items() if name.endswith(("query", "key", "value", "up"))}
    found, lost = {"float32": excess(model, study, base)}, {}
    for name, axis in (("per tensor", None), ("per token", 0), ("per channel", 1)):
        found[name] = excess(model, study, base, lambda layer, axis=axis: FakeLinear(layer, w_bits=None, x_axis=axis))
        lost[name] = statistics.mean(zero_share(x, quantize(x, 8, axis)) for x in wide.values())
    found["decomposition"] = excess(model, study, base, DecomposedLinear)
    for k, (norm, linears) in enumerate(readers(model)):
        path = f"blocks.{k // 2}." + ("mlp.up" if k % 2 else "attention.query")
        migrate(norm, linears, inputs[path].abs().amax(0))
    found["SmoothQuant"] = excess(model, study, base, convert_per_tensor)
    return found, lost


def convert_per_tensor(layer):
    return FakeLinear(layer, x_axis=None)


def of_gpt(seed: int, study: Study, say: Callable[[str], None] = lambda text: None) -> dict[tuple[str, str], float]:
    """{(what, form): figure} for one seed's GPT."""
    say(f"quantize, GPT of seed {seed}: training")
    model = train(GPT(study.config(seed=seed)), study, seed, steps=study.steps, lr=study.lr)
    base = loss(model, study)
    found = {("loss", "float32"): base}
    say(f"quantize, GPT of seed {seed}: rounding")
    found["W8A8", "true int8"] = excess(model, study, base, Int8Linear.of)
    found["W8A8", "fake"] = excess(model, study, base, FakeLinear)
    inputs = calibration(model, study)
    for bits in (3, 4):
        found |= {(f"weights of {bits} bits", k): v for k, v in weights_only(model, study, base, inputs, bits).items()}
    spoilt, lost = injected(model, study, base)
    found |= {("outliers", name): value for name, value in spoilt.items()}
    found |= {("rounded to zero", name): value for name, value in lost.items()}
    cached = copy.deepcopy(model)
    for block in cached.blocks:
        block.attention.core = rounded_core
    found["key-value cache", "int8"] = excess(cached, study, base)
    say(f"quantize, GPT of seed {seed}: training with 3 bits")
    found |= {("trained further", k): v for k, v in trained_further(model, study, seed, base).items()}
    say(f"quantize, GPT of seed {seed}: training in int8")
    return found | {("int8 training", k): v for k, v in trained_in_int8(study, seed).items()}


def trained_in_int8(study: Study, seed: int, *, steps: int | None = None) -> dict[str, float]:
    """Loss after `steps` steps (None: `study.calm`) of a fresh GPT in float32, and how far off it is trained in int8, or in
    float32 from weights of which each differs in its last bit.

    The steps are small, and Adam's eps is large: with the study's own rate, runs that differ by a last bit end up to 0.3 nats
    apart, so that nothing could be said about int8.
    """
    calm = {"steps": steps or study.calm, "lr": 1e-3, "eps": 1e-3}
    start = GPT(study.config(seed=seed))
    nudged = copy.deepcopy(start)
    with torch.no_grad():
        for p in nudged.parameters():
            p.mul_(1 + 2**-23)
    eighth = train(int8_training(start), study, seed, **calm)
    plain = loss(train(start, study, seed, **calm), study)
    last_bit = loss(train(nudged, study, seed, **calm), study)
    return {"float32": plain, "int8": loss(eighth, study) - plain, "float32, last bit": last_bit - plain}


def trained_further(model: GPT, study: Study, seed: int, base: float, *, bits: int = 3) -> dict[str, float]:
    """Excess beyond float32 trained for the same further steps: rounded per tensor without training, and trained rounded."""
    same = {"steps": study.more, "lr": study.lr / 10, "first": study.steps}
    further = train(copy.deepcopy(model), study, seed, **same)
    fair = loss(further, study)
    rounded = excess(further, study, fair, lambda layer: FakeLinear(layer, w_bits=bits, w_axis=None, x_bits=None))
    aware = train(prepare_qat(model, bits, None), study, seed, **same)
    return {"float32": fair - base, f"rounded to {bits} bits": rounded, f"trained at {bits} bits": loss(aware, study) - fair}


def of_digits(seed: int, steps: int = 150) -> dict[tuple[str, str], float]:
    """{(what, form): figure} for one seed's conv net, batch norms folded."""
    net = fold_model(pictures.train_digits(pictures.digits_net(seed), steps=steps, seed=seed)).eval()
    base = pictures.accuracy(net)
    found = {("accuracy", "float32"): base}
    found["W8A8 points", "true int8"] = pictures.accuracy(convert(net, Int8Linear.of)) - base
    for bits in (8, 4, 3, 2):
        for name, axis in (("per tensor", None), ("per channel", 0)):
            rounded = convert(net, lambda layer, b=bits, a=axis: FakeLinear(layer, w_bits=b, w_axis=a, x_bits=None))
            found[f"weights of {bits} bits, points", name] = pictures.accuracy(rounded) - base
    return found


def rows(
    options, say: Callable[[str], None] = lambda text: None, *, study: Study | None = None, seeds=(1, 2, 3)
) -> Iterator[Row]:
    """One row for each (model, what, form): the mean over the seeds, the smallest and the largest.

    `options.seeds` (a list, or None) takes the place of `seeds`. Where it is interrupted, rows are of the seeds that are done.
    """
    study = study or Study()
    for name, measure in (("digits", of_digits), ("gpt", lambda seed: of_gpt(seed, study, say))):
        runs = []
        try:
            for seed in getattr(options, "seeds", None) or seeds:
                runs.append(measure(seed))
        except KeyboardInterrupt:
            yield from summary(name, runs) if runs else ()
            raise
        yield from summary(name, runs)


def _metric(what: str, form: str) -> str:
    if (what, form) == ("int8 training", "float32"):
        return "loss"
    return what if what in ("loss", "accuracy", "rounded to zero") else "excess"


def summary(model: str, runs: list[dict]) -> Iterator[Row]:
    """One row for each (what, form) of `of_gpt` or `of_digits` over several seeds."""
    for what, form in runs[0]:
        values = [run[what, form] for run in runs]
        yield Row(
            benchmark="quantize",
            case={"model": model, "what": what, "form": form, "seeds": len(runs)},
            metric=_metric(what, form),
            value=statistics.mean(values),
            unit="" if what == "rounded to zero" else "%" if model == "digits" else "nat",
            low=min(values),
            high=max(values),
            machine={"text": text.fingerprint()},
        )
