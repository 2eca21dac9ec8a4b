"""The sizes of a transformer, in one place, so that parameters, FLOPs and activations are counted from the same description.

A decoder of L equal layers: attention with a query heads and `kv_heads` key heads, then an MLP (plain or gated, one or many
experts), each behind a norm. Symbols as everywhere: a heads, h width, s sequence length, L layers, V vocabulary, f width of the
MLP.

    P = L (4 h^2 + 2 h f + 9 h + f) + (V + s) h + 2 h        (GPT: biases, learned positions, tied output; 12 L h^2 for large h)

Reference: Narayanan et al. 2021 (arXiv:2104.04473) eq. 2, which leaves out the 2h of the last norm.
"""

import difflib
from dataclasses import dataclass
from fractions import Fraction

from .terms import Term, Terms, exact

__all__ = ["MODELS", "Shape", "get_model", "nearest_multiples"]


def nearest_multiples(value: int, of: int) -> str:
    """The legal neighbours of a size that must be a multiple: nearest_multiples(100, 8) -> "96 or 104"."""
    below, above = value // of * of, -(-value // of) * of
    return f"{below} or {above}" if below else f"{above}"


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer. ff None: 4 width (gated: 8/3 width must be stated). kv_heads None: as many as heads. experts 1:
    dense.
    """

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    ff: int | None = None
    kv_heads: int | None = None
    gated: bool = False
    bias: bool = True
    tied: bool = True
    positions: bool = True  # a learned vector for each position; False: rotary, no parameters
    norm: str = "layer"  # "layer": scale and shift; "rms": scale
    experts: int = 1
    top_k: int = 1
    name: str = ""

    def __post_init__(self):
        if self.ff is None:
            object.__setattr__(self, "ff", 4 * self.width)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for word in ("layers", "width", "heads", "length", "vocabulary", "ff", "kv_heads", "experts", "top_k"):
            value = getattr(self, word)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{word} is {value!r}; it is a whole number of at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is no multiple of heads {self.heads}; nearest: {nearest_multiples(self.width, self.heads)}"
            )
        if self.heads % self.kv_heads:
            near = nearest_multiples(self.heads, self.kv_heads)
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}; nearest: {near}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, but there are only {self.experts} experts; allowed: 1 to {self.experts}")
        if self.norm not in ("layer", "rms"):
            raise ValueError(f"norm is {self.norm!r}; allowed: 'layer' or 'rms'")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of keys (and of values): kv_heads * head_width."""
        return self.kv_heads * self.head_width

    def layer_parameters(self, tp: int = 1) -> Terms:
        """Parameters of one layer on one of `tp` tensor-parallel ranks, line by line, in numbers (not bytes).

        Every rank has the norms, the two biases that follow a sum over ranks, and the router; the rest is shared.
        """
        h, f, kv, e, b = self.width, self.ff, self.kv_width, self.experts, int(self.bias)
        up, over = (2 if self.gated else 1), (f" / {tp}" if tp > 1 else "")
        norm = 2 * h if self.norm == "layer" else h

        def line(name: str, formula: str, shared: int, whole: int = 0, rest: str = "", count: int = 1) -> Term:
            return Term(
                name, (formula + over if shared else formula) + rest, exact(Fraction(shared, tp) + whole), count, "params"
            )

        return Terms(
            [
                line("norms", "2h" if self.norm == "layer" else "h", 0, norm, count=2),
                line("query, key, value", "(h + 1)(h + 2 kv)" if b else "h (h + 2 kv)", (h + b) * (h + 2 * kv)),
                line("attention output", "h^2", h * h, b * h, " + h" * b),
                line("MLP up", ("2" if up == 2 else "") + ("(h + 1) f" if b else "hf"), up * (h + b) * f, count=e),
                line("MLP down", "fh", f * h, b * h, " + h" * b, e),
                *([line("router", "h e", 0, h * e)] if e > 1 else []),
            ],
            title=f"parameters of one layer: h={h}, f={f}, kv={kv}, tp={tp}",
        )

    def end_parameters(self, tp: int = 1) -> Terms:
        """Parameters outside the layers, on one of `tp` ranks: the vocabulary is shared, positions and the last norm are not."""
        h, v, over = self.width, self.vocabulary, f" / {tp}" if tp > 1 else ""
        table = exact(Fraction(v * h, tp))
        ends = [Term("token embedding", f"V h{over}", table, 1, "params")]
        if self.positions:
            ends.append(Term("positions", "s h", self.length * h, 1, "params"))
        ends.append(Term("last norm", "2h" if self.norm == "layer" else "h", 2 * h if self.norm == "layer" else h, 1, "params"))
        if not self.tied:
            ends.append(Term("output head", f"V h{over}", table, 1, "params"))
        return Terms(ends, title=f"parameters outside the layers: V={v}, s={self.length}, h={h}, tp={tp}")

    def parameters(self) -> Terms:
        """Parameters of the whole model, line by line, in numbers (not bytes)."""
        sizes = f"L={self.layers}, h={self.width}, a={self.heads}, s={self.length}, V={self.vocabulary}"
        both = [*self.layer_parameters().times(self.layers), *self.end_parameters()]
        return Terms(both, title=f"parameters: {sizes}" + (f" ({self.name})" if self.name else ""))

    def rank_parameters(self, tp: int = 1, pp: int = 1) -> Terms:
        """What a rank of the first of `pp` pipeline stages holds: L/pp layers, the input tables (one stage: all)."""
        ends = [t for t in self.end_parameters(tp) if pp == 1 or t.name in ("token embedding", "positions")]
        layers = self.layer_parameters(tp).times(Fraction(self.layers, pp))
        return Terms([*layers, *ends], title=f"parameters of a rank of the first stage: tp={tp}, pp={pp}")

    @property
    def parameter_count(self) -> int:
        return int(self.parameters().total)

    @property
    def active_parameter_count(self) -> int:
        """Parameters that one token passes through: with experts, only top_k of them."""
        layer = self.layer_parameters()
        idle = self.experts - self.top_k
        return self.parameter_count - idle * self.layers * int(layer["MLP up"].each + layer["MLP down"].each)


def _gpt(name: str, layers: int, width: int, heads: int, **more) -> Shape:
    return Shape(layers, width, heads, more.pop("length", 2048), more.pop("vocabulary", 51200), name=name, **more)


_LLAMA = {"bias": False, "tied": False, "positions": False, "norm": "rms", "gated": True}
MODELS: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _gpt("gpt2", 12, 768, 12, length=1024, vocabulary=50257),  # Radford et al. 2019
        _gpt(
            "bert-large", 24, 1024, 16, length=512, vocabulary=30522
        ),  # Devlin et al. 2018; its segment table and pooler left out
        _gpt("7.5B", 36, 4096, 32),  # Narayanan et al. 2021, Table 1
        _gpt("22B", 48, 6144, 64),  # Korthikanti et al. 2022, Table 3
        _gpt("175B", 96, 12288, 96),  # Brown et al. 2020 (GPT-3); vocabulary padded as in Narayanan et al. 2021
        _gpt("530B", 105, 20480, 128),  # Korthikanti et al. 2022, Table 3
        _gpt("1T", 128, 25600, 160),  # Korthikanti et al. 2022, Table 3
        _gpt("llama2-7b", 32, 4096, 32, length=4096, vocabulary=32000, ff=11008, **_LLAMA),  # Touvron et al. 2023
        _gpt("llama3-8b", 32, 4096, 32, length=8192, vocabulary=128256, ff=14336, kv_heads=8, **_LLAMA),  # Dubey et al. 2024
        _gpt(
            "mixtral-8x7b", 32, 4096, 32, length=4096, vocabulary=32000, ff=14336, kv_heads=8, experts=8, top_k=2, **_LLAMA
        ),  # Jiang 2024
    )
}


def get_model(model: "str | Shape") -> Shape:
    """The preset of that name, or the shape itself. ValueError with close names for one that does not exist."""
    if isinstance(model, Shape):
        return model
    for name, shape in MODELS.items():
        if isinstance(model, str) and name.lower() == model.strip().lower():
            return shape
    close = difflib.get_close_matches(str(model), MODELS, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise ValueError(f"no model named {model!r}{hint} Known: {', '.join(MODELS)}")
