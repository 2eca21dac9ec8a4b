"""Which operator computes in 16 bits, and which in 32: a table, and a mode that reads it at every call.

Products read many numbers for each that they write, multiply exactly and add up in fp32 inside: they gain most from 16 bits and
lose least. Sums, norms, exponentials and losses lose small terms, or overflow, so they keep 32. All else takes what it gets. The
weights stay in fp32; a region casts each one once and remembers the copy for as long as the weight stays as it was.

    low: f(cast16(x), cast16(w))        high: f(cast32(x))        else: f(x)

Reference: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.3; torch.amp, "Op-specific behavior".
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from .formats import get_format

__all__ = ["HIGH", "LOW", "LOW_FORMATS", "TABLES", "WIDEST", "Autocast", "through"]

LOW = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "__matmul__",
    "__rmatmul__",
})  # fmt: skip
# losses and products of many factors, which torch takes to fp32 on CPUs too
LOSSES = frozenset({
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy_with_logits", "prod",
})  # fmt: skip
# what else torch takes to fp32 on GPUs; on CPUs it leaves these alone, as their kernels add up in fp32 inside
HIGH = LOSSES | frozenset({
    "softmax", "log_softmax", "logsumexp", "layer_norm", "group_norm", "rms_norm", "sum", "cumsum", "cumprod", "norm",
    "exp", "expm1", "log", "log2", "log10", "log1p", "pow", "__pow__", "rsqrt", "reciprocal", "softplus", "sinh", "cosh",
    "tan", "acos", "asin",
})  # fmt: skip
WIDEST = frozenset({"cat", "stack"})  # arguments of several dtypes: the widest of them
TABLES = {"cpu": (LOW, LOSSES, WIDEST), "careful": (LOW, HIGH, WIDEST)}
LOW_FORMATS = ("bf16", "fp16")


class Autocast(TorchFunctionMode):
    """`with Autocast("bf16"): loss = model.loss(x, y)`, then `loss.backward()` outside.

    table: "careful" (softmax, norms, sums and losses in fp32, as torch does on GPUs) or "cpu" (losses alone, as torch.autocast
    does there). arithmetic: "native" casts and calls the kernel of that dtype; "float32" rounds what goes into a low operator and
    what comes out of it, gradients too, and computes in between in fp32. That is what the hardware does, whose products are added
    up in fp32, in the time of fp32 and its bytes: for a processor on which 16 bits are slow. ValueError for other words.

    What writes where it is told to (`out=`) is left as it is, as torch does: cast, it would fill a copy that nobody sees.
    """

    casts = True  # how an optimiser's step tells that it stands inside a region

    def __init__(self, format: str = "bf16", *, table: str = "careful", arithmetic: str = "native"):
        super().__init__()
        if format not in LOW_FORMATS:
            raise ValueError(f"format is {format!r}; allowed: {', '.join(LOW_FORMATS)}")
        if table not in TABLES:
            raise ValueError(f"table is {table!r}; allowed: {', '.join(TABLES)}")
        if arithmetic not in ("native", "float32"):
            raise ValueError(f"arithmetic is {arithmetic!r}; allowed: native, float32")
        self.dtype, self.native = get_format(format).dtype, arithmetic == "native"
        self.low, self.high, self.widest = TABLES[table]
        self._copies: dict[int, tuple] = {}  # id of a weight -> (the weight, its version, its 16-bit copy)
        self._depth = 0

    def __enter__(self):
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error):
        self._depth -= 1
        if not self._depth:
            self._copies.clear()
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if name in self.low:
            args, kwargs = tree_map(self._to_low, (args, kwargs))
            out = func(*args, **kwargs)
            return out if self.native else through(out, self.dtype)
        if name in self.high:
            args, kwargs = tree_map(_to_high, (args, kwargs))
        elif name in self.widest:
            args, kwargs = _to_widest(args, kwargs)
        return func(*args, **kwargs)

    def _to_low(self, x):
        if not _is_float(x):
            return x
        if not self.native:
            return through(x, self.dtype)
        if not (x.is_leaf and x.requires_grad):
            return x.to(self.dtype)
        weight, version, copy = self._copies.get(id(x), (None, None, None))
        if weight is not x or version != x._version or (torch.is_grad_enabled() and not copy.requires_grad):
            copy = x.to(self.dtype)
            self._copies[id(x)] = (x, x._version, copy)
        return copy


class _Through(torch.autograd.Function):
    """To 16 bits and back, forward and backward: the number keeps its fp32 place and loses what 16 bits cannot hold."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


def through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to `dtype` and its gradient too, both in x's dtype; same shape."""
    return _Through.apply(x, dtype)


def _is_float(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _to_high(x):
    return x.float() if _is_float(x) else x


def _to_widest(args, kwargs):
    found = [x.dtype for x in tree_flatten((args, kwargs))[0] if _is_float(x)]
    wide = max(found, key=lambda d: d.itemsize, default=torch.float32)
    return tree_map(lambda x: x.to(wide) if _is_float(x) else x, (args, kwargs))
