"""The product of int8 matrices with exact sums in int32: which instruction does it, how long a sum may be, and what to distrust.

One product of two 8-bit integers needs 15 bits and a sign; an int32 sum holds 131,071 of the largest. A processor with dot
products of bytes (VNNI, AMX; DP4A and tensor cores on GPUs) does four of them where fp32 does one. Without, torch's kernel is a
plain loop, and float32 is both faster and exact, as long as no partial sum passes 2^24: that takes blocks of 1,024 columns.

    |sum over K| <= K * 2^7 * 2^7 < 2^31   for K <= 131,071;          K * 2^14 <= 2^24   for K <= 1,024

Reference: Intel SDM, VPDPBUSD; torch._int_mm.
"""

import functools
import platform
from pathlib import Path

import torch

__all__ = ["HOW", "LONGEST_FLOAT", "LONGEST_INT32", "dot_instructions", "int_product"]

LONGEST_INT32 = (2**31 - 1) // 2**14  # 131,071
LONGEST_FLOAT = 2**24 // 2**14  # 1,024
HOW = ("integer", "float32", "auto")
DOT = ("avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm")


@functools.lru_cache(maxsize=1)
def dot_instructions() -> tuple[str, ...]:
    """Names of this processor's instructions for dot products of bytes, as /proc/cpuinfo has them; () without that file."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return tuple(sorted(set(line.partition(":")[2].split()) & set(DOT)))
    except OSError:
        pass
    return ("asimddp",) if platform.machine() == "arm64" else ()  # every Apple silicon has it


def int_product(a: torch.Tensor, b: torch.Tensor, *, how: str = "integer", out: torch.Tensor | None = None) -> torch.Tensor:
    """a (m, k) int8, b (n, k) int8 -> a b^T (m, n), exactly, in int32. Both are stored with k last, as activations and weights
    are.

    how: "integer" is torch._int_mm; "float32" gives the same integers through float32 in blocks of columns; "auto" takes the
    first on GPUs and on processors with dot products of bytes, else the second. k beyond 131,071 may pass int32: then the sum is
    made in pieces and returned in int64. `out` (m, n) int32 is filled instead of a new tensor. ValueError for other shapes or
    dtypes.
    """
    _check(a, b, how, out)
    (m, k), n = a.shape, b.shape[0]
    if k > LONGEST_INT32:
        if out is not None:
            raise ValueError(f"k = {k}: sums of more than {LONGEST_INT32:,} products may pass int32, so use out=None (int64)")
        pieces = zip(a.split(LONGEST_INT32, 1), b.split(LONGEST_INT32, 1), strict=True)
        return sum((int_product(x, y, how=how).to(torch.int64) for x, y in pieces), torch.zeros((), dtype=torch.int64))
    out = torch.empty(m, n, dtype=torch.int32, device=a.device) if out is None else out
    if 0 in (m, k, n):
        return out.zero_()
    if how == "auto":
        how = "integer" if a.is_cuda or dot_instructions() else "float32"
    if how == "integer" and self_test(a.device.type):
        return _integer(a, b, out)
    return _float(a, b, out)


def _check(a, b, how, out):
    if how not in HOW:
        raise ValueError(f"how is {how!r}; allowed: {', '.join(HOW)}")
    for name, x in (("a", a), ("b", b)):
        if x.dtype != torch.int8 or x.dim() != 2:
            raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)}; allowed: int8 of two dims, k last")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} differ in their last dim; allowed: (m, k) and (n, k)")
    if out is not None and (out.dtype != torch.int32 or tuple(out.shape) != (a.shape[0], b.shape[0])):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; allowed: int32 {(a.shape[0], b.shape[0])}")


def plain(x: torch.Tensor) -> torch.Tensor:
    """x with the strides that its shape asks for. One row of stride 0 counts as contiguous, yet torch's product reads it wrongly
    on some processors, so contiguous() is not enough.
    """
    wanted = (x.shape[1], 1)
    return x if x.stride() == wanted else x.clone(memory_format=torch.contiguous_format)


def _integer(a, b, out):
    a, b = plain(a), plain(b)
    if a.is_cuda:  # its kernel wants more than 16 rows, and multiples of 8: fill up with zeros, which add nothing
        m, n = out.shape
        pad = torch.nn.functional.pad
        a = pad(a, (0, -a.shape[1] % 8, 0, max(0, 24 - m)))
        b = pad(b, (0, -b.shape[1] % 8, 0, -n % 8))
        return out.copy_(torch._int_mm(a, b.t())[:m, :n])
    return torch._int_mm(a, b.t(), out=out) if out.is_contiguous() else out.copy_(torch._int_mm(a, b.t()))


def _float(a, b, out):
    """Every product and every partial sum is a whole number of at most 2^24, so float32 holds it exactly, in any order."""
    for place, (x, y) in enumerate(zip(a.split(LONGEST_FLOAT, 1), b.split(LONGEST_FLOAT, 1), strict=True)):
        part = x.float() @ y.float().t()
        out.copy_(part) if place == 0 else out.add_(part.to(torch.int32))
    return out


@functools.lru_cache(maxsize=4)
def self_test(device: str = "cpu") -> bool:
    """Is torch's integer product right on this machine? Asked once: odd shapes, one row, rows of stride 0, the largest values.

    Where it is not, `int_product` goes through float32, which is exact as well.
    """
    generator = torch.Generator().manual_seed(3)
    for m, k, n in ((1, 1, 1), (1, 512, 512), (3, 5, 7), (17, 64, 33), (64, 257, 8), (32, 96, 1)):
        a, b = (torch.randint(-128, 128, s, dtype=torch.int8, generator=generator) for s in ((m, k), (n, k)))
        if m == 1:
            a = a.as_strided((1, k), (0, 1))
        a[:, ::2], b[:, ::2] = -128, 127  # sums of bytes in 16 bits on the way would saturate
        right = (a.double() @ b.double().t()).to(torch.int32)
        found = _integer(a.to(device), b.to(device), torch.empty(m, n, dtype=torch.int32, device=device))
        if not torch.equal(found.cpu(), right):
            return False
    return True
