"""Softmax, layer norm and tiled attention as GPU kernels in Triton: the same passes, one program for each row or tile.

A GPU's registers and shared memory take the place of the cache: a program loads a piece, does all operators on it, and stores the
result once. Rows longer than a piece are done with the running sums of softmax.py and norm.py, attention with those of tile.py.
Needs Triton and a CUDA device (with TRITON_INTERPRET=1 in the environment Triton's interpreter runs them on a CPU, slowly).

    grid: one program a row (softmax, layer norm);  one for each tile of queries of each head (attention)

Reference: Tillet, Kung and Cox 2019, "Triton", MAPL; Dao 2023 (arXiv:2307.08691) for the loop over keys.
"""

import math
import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch's CUDA builds on Linux only
    triton = tl = None

__all__ = ["attention_triton", "available", "layer_norm_triton", "softmax_triton"]

PIECE = 4096  # numbers of a row that a program holds at once, at most
QUERIES, KEYS = 64, 64  # of a tile of attention
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def available() -> bool:
    """Whether the kernels can run here: Triton is installed, and there is a CUDA device or its interpreter is on."""
    return triton is not None and (torch.cuda.is_available() or _interpreted())


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


if triton is not None:

    @triton.jit
    def _softmax_rows(x, y, columns, PIECE: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        places = tl.arange(0, PIECE)
        largest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        for start in range(0, columns, PIECE):
            inside = start + places < columns
            part = tl.load(x + row * columns + start + places, mask=inside, other=float("-inf")).to(tl.float32)
            bad = tl.max((part != part).to(tl.int32), 0)  # a maximum may pass over nan; softmax must not
            newest = tl.maximum(largest, tl.max(part, 0))
            finite = tl.where(newest == float("-inf"), 0.0, newest)
            total = total * tl.exp(largest - finite) + tl.sum(tl.exp(part - finite), 0)
            total = tl.where(bad > 0, float("nan"), total)
            largest = newest
        for start in range(0, columns, PIECE):
            inside = start + places < columns
            part = tl.load(x + row * columns + start + places, mask=inside, other=float("-inf")).to(tl.float32)
            result = tl.exp(part - largest) / total
            tl.store(y + row * columns + start + places, result.to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def _norm_rows(x, y, weight, bias, columns, eps, PIECE: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        places = tl.arange(0, PIECE)
        seen = tl.zeros([1], tl.float32)
        mean = tl.zeros([1], tl.float32)
        spread = tl.zeros([1], tl.float32)
        for start in range(0, columns, PIECE):
            inside = start + places < columns
            part = tl.load(x + row * columns + start + places, mask=inside, other=0.0).to(tl.float32)
            count = tl.minimum(columns - start, PIECE).to(tl.float32)
            middle = tl.sum(part, 0) / count
            far = tl.where(inside, part - middle, 0.0)
            apart = middle - mean
            share = count / (seen + count)
            mean += apart * share
            spread += tl.sum(far * far, 0) + apart * apart * (seen * share)
            seen += count
        scale = 1.0 / tl.sqrt(spread / seen + eps)
        for start in range(0, columns, PIECE):
            inside = start + places < columns
            part = tl.load(x + row * columns + start + places, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(weight + start + places, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(bias + start + places, mask=inside, other=0.0).to(tl.float32)
            result = (part - mean) * scale * w + b
            tl.store(y + row * columns + start + places, result.to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def _attention_tiles(
        q, k, v, out, log_sum, length, keys, scale, group,
        CAUSAL: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        head = tl.program_id(1).to(tl.int64)
        rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
        wide = tl.arange(0, WIDE)  # the power of two from D on
        own = (rows[:, None] < length) & (wide[None, :] < D)
        mine = tl.load(q + head * length * D + rows[:, None] * D + wide[None, :], mask=own, other=0.0)
        shared = head // group
        largest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, WIDE], tl.float32)
        stop = tl.minimum(keys, (tl.program_id(0) + 1) * QUERIES) if CAUSAL else keys
        for start in range(0, stop, KEYS):
            columns = start + tl.arange(0, KEYS)
            theirs = (columns[:, None] < keys) & (wide[None, :] < D)
            place = shared * keys * D + columns[:, None] * D + wide[None, :]
            key = tl.load(k + place, mask=theirs, other=0.0)
            scores = tl.dot(mine, tl.trans(key), input_precision="ieee") * scale
            open = columns[None, :] < keys
            if CAUSAL:
                open = open & (columns[None, :] <= rows[:, None])
            scores = tl.where(open, scores, float("-inf"))
            newest = tl.maximum(largest, tl.max(scores, 1))
            finite = tl.where(newest == float("-inf"), 0.0, newest)
            shrink = tl.exp(largest - finite)
            weights = tl.exp(scores - finite[:, None])
            total = total * shrink + tl.sum(weights, 1)
            value = tl.load(v + place, mask=theirs, other=0.0)
            sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            largest = newest
        safe = tl.where(total == 0.0, 1.0, total)
        result = (sums / safe[:, None]).to(out.dtype.element_ty)
        tl.store(out + head * length * D + rows[:, None] * D + wide[None, :], result, mask=own)
        tl.store(log_sum + head * length + rows, largest + tl.log(total), mask=rows < length)


def softmax_triton(x: torch.Tensor) -> torch.Tensor:
    """(..., n) -> (..., n) over the last dim, sums in float32. ValueError without Triton, a CUDA device, or one of DTYPES."""
    _check("softmax_triton", x)
    source, result = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        columns = x.shape[-1]
        piece = min(triton.next_power_of_2(columns), PIECE)
        _softmax_rows[(x.numel() // columns,)](source, result, columns, PIECE=piece)
    return result


def layer_norm_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """x (..., n), weight and bias (n,) -> (..., n). ValueError as for `softmax_triton`, and for sizes that do not fit."""
    _check("layer_norm_triton", x, weight, bias)
    if x.dim() == 0 or weight.shape != x.shape[-1:] or bias.shape != weight.shape:
        raise ValueError(f"weight {tuple(weight.shape)}, bias {tuple(bias.shape)} do not fit x {tuple(x.shape)}; allowed: (n,)")
    source, result = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        columns = x.shape[-1]
        piece = min(triton.next_power_of_2(columns), PIECE)
        rows = x.numel() // columns
        _norm_rows[(rows,)](source, result, weight.contiguous(), bias.contiguous(), columns, eps, PIECE=piece)
    return result


def attention_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (b, a, s, d), k and v (b, kv, n, d) -> (out (b, a, s, d), log of each query's sum (b, a, s) in float32). Forward only.

    ValueError as for `softmax_triton`, and for shapes that do not fit (kv divides a; causal needs n = s; d at most 128).
    """
    _check("attention_triton", q, k, v)
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    fits = fits and 0 < q.shape[3] <= 128 and k.shape[1] and q.shape[1] % k.shape[1] == 0
    if not fits or (causal and q.shape[2] != k.shape[2]):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, causal {causal}; allowed: q (b, a, s, d), k and v "
            "(b, kv, n, d), kv divides a, d at most 128, and n = s where causal"
        )
    batch, heads, length, d = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, log_sum = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel():
        wide = max(16, triton.next_power_of_2(d))
        grid = (triton.cdiv(length, QUERIES), batch * heads)
        _attention_tiles[grid](
            q, k, v, out, log_sum, length, k.shape[2], 1 / math.sqrt(d), heads // k.shape[1],
            CAUSAL=causal, D=d, WIDE=wide, QUERIES=QUERIES, KEYS=KEYS,
        )  # fmt: skip
    return out, log_sum


def _check(what: str, *tensors: torch.Tensor) -> None:
    if triton is None:
        raise ValueError(f"{what} needs Triton, which comes with torch's CUDA builds; on a CPU the row blocks do the same")
    if not (all(t.is_cuda for t in tensors) or _interpreted()):
        raise ValueError(f"{what} needs tensors on a CUDA device, and got {', '.join(str(t.device) for t in tensors)}")
    if any(t.dtype not in DTYPES or t.dtype != tensors[0].dtype for t in tensors):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"{what} of {', '.join(str(t.dtype) for t in tensors)}; allowed: one dtype of {names}")
