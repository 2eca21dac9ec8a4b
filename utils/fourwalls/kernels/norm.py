"""Layer norm three ways: nine operators, the same on rows that stay in a cache, and with a running mean and variance.

A variance needs the mean first, so the plain way goes over a row twice before it can write. Mean and sum of squared distances
can be kept up to date together: where a new piece has another mean, the distance between the two means is part of the spread. The
tempting other way, the mean of the squares less the square of the mean, subtracts two large numbers and can lose every digit.

    d = mean_new - mean,   mean += d k/(n+k),   M += M_new + d^2 n k/(n+k)        variance = M / n

Reference: Welford 1962; Chan, Golub and LeVeque 1979 for pieces of several numbers; Ba et al. 2016 (arXiv:1607.06450).
"""

import torch

from .rows import check_floating, chunk_of, flat_rows, need_no_gradient, place_of_result, row_slices, wide_dtype

__all__ = [
    "layer_norm_blocks",
    "layer_norm_online",
    "layer_norm_separate",
    "running_mean_and_variance",
    "two_sums_variance",
]


def layer_norm_separate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """x (..., n), weight and bias (n,) -> (..., n): mean 0 and variance 1 over the last dim, then scale and shift.

    All forms here compute in at least float32: in fp16 the square of 256 is infinite already.
    """
    _check(x, weight, bias, eps)
    given, x = x.dtype, x.to(wide_dtype(x))
    mean = x.mean(-1, keepdim=True)  # (..., 1)
    distance = x - mean
    variance = (distance * distance).mean(-1, keepdim=True)
    normal = distance * (variance + eps).rsqrt()
    return (normal * weight + bias).to(given)


def layer_norm_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    rows: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `layer_norm_separate`, `rows` rows at a time. Forward only; out may be x itself.

    ValueError for sizes that do not fit, rows below 1, or inputs that want a gradient.
    """
    _check(x, weight, bias, eps)
    need_no_gradient("layer_norm_blocks", "layer_norm_separate", x, weight, bias)
    result = place_of_result(x, out)
    source, target = flat_rows(x), flat_rows(result)
    slices = [*row_slices(len(source), rows, source.shape[1], x.element_size(), tensors=3)]
    largest = slices[0].stop if slices else 0
    wide = wide_dtype(x)
    weight, bias = weight.to(wide), bias.to(wide)
    stat, squares = (x.new_empty(largest, columns, dtype=wide) for columns in (1, source.shape[1]))
    for block in slices:
        count = block.stop - block.start
        y = target[block].to(wide)  # the place itself, or room of its size
        _norm_block(source[block].to(wide), y, weight, bias, eps, stat[:count], squares[:count])
        if wide != x.dtype:
            target[block] = y
    return result


def _norm_block(x, y, weight, bias, eps, stat, squares) -> None:
    """x (r, n) -> y (r, n), of one dtype; stat (r, 1) and squares (r, n) are room to work in."""
    torch.mean(x, -1, keepdim=True, out=stat)
    torch.sub(x, stat, out=y)
    torch.mul(y, y, out=squares)
    torch.mean(squares, -1, keepdim=True, out=stat)
    stat.add_(eps).rsqrt_()
    y.mul_(stat)
    torch.addcmul(bias, y, weight, out=y)


def layer_norm_online(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    columns: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `layer_norm_separate`, in two passes: one for mean and variance, one that writes. For rows longer than a cache.

    columns: numbers of a row that are looked at together (None: as many as stay in the cache). Forward only.
    """
    _check(x, weight, bias, eps)
    need_no_gradient("layer_norm_online", "layer_norm_separate", x, weight, bias)
    result = place_of_result(x, out)
    source, target = flat_rows(x), flat_rows(result)
    chunk, rows = chunk_of(source, columns)
    for block in row_slices(len(source), rows, chunk, x.element_size()):
        mean, variance = _running(source[block], chunk)
        scale = variance.add_(eps).rsqrt_()
        pieces = (source[block], target[block], weight, bias)
        for x_part, y_part, w, b in zip(*(piece.split(chunk, -1) for piece in pieces), strict=True):
            y = y_part.to(mean.dtype)
            torch.sub(x_part, mean, out=y)
            torch.addcmul(b.to(y.dtype), y.mul_(scale), w.to(y.dtype), out=y)
            if y.dtype != x.dtype:
                y_part.copy_(y)
    return result


def running_mean_and_variance(x: torch.Tensor, *, columns: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, variance) of each row, (..., 1) each, from one pass over chunks of `columns` numbers; columns 1 is Welford's own.

    The variance is that of the row itself, divided by n. Both are of at least float32.
    """
    check_floating(x, "mean and variance")
    with torch.no_grad():
        source = flat_rows(x)
        chunk, rows = chunk_of(source, columns)
        parts = [_running(source[block], chunk) for block in row_slices(len(source), rows, chunk, 1)]
        shape = (*x.shape[:-1], 1)
        if not parts:
            return tuple(x.new_full(shape, torch.nan, dtype=wide_dtype(x)) for _ in range(2))
        return tuple(torch.cat(side).view(shape) for side in zip(*parts, strict=True))


def two_sums_variance(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, E[x^2] - E[x]^2) of each row, (..., 1) each: one pass as well, and wrong where the mean is large beside the spread.

    In float32, numbers near 10,000 with a spread of 1 keep no digit; the result can even be below 0.
    """
    check_floating(x, "mean and variance")
    mean = x.mean(-1, keepdim=True)
    return mean, (x * x).mean(-1, keepdim=True) - mean * mean


def _running(x: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, variance) of the rows of x (r, n), (r, 1) each."""
    wide = wide_dtype(x)
    seen, mean, spread = 0, x.new_zeros(len(x), 1, dtype=wide), x.new_zeros(len(x), 1, dtype=wide)
    for part in x.split(chunk, -1):
        count = part.shape[1]
        variance, middle = torch.var_mean(part.to(wide), -1, correction=0, keepdim=True)
        apart = middle - mean
        share = count / (seen + count)
        mean = mean + apart * share
        spread = spread + variance * count + apart * apart * (seen * share)
        seen += count
    return mean, spread / max(seen, 1)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
    check_floating(x, "layer norm")
    if x.dim() == 0 or weight.shape != x.shape[-1:] or bias.shape != weight.shape:
        wanted = f"({x.shape[-1]},) for both" if x.dim() else "x of at least one dim"
        raise ValueError(
            f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} do not fit x {tuple(x.shape)}; allowed: {wanted}"
        )
    if not eps >= 0:
        raise ValueError(f"eps is {eps!r}; it is at least 0")
