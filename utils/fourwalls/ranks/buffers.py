"""Tensors as memory: do two of them share bytes, does one hold an element twice, has one been changed?

A message reads or writes memory while the program goes on, so two messages that touch the same bytes, one of them writing, give a
result that depends on which comes first. Torch sees tensors; these questions are about the bytes under them.

    bytes of a tensor = { start + sum_d i_d * stride_d + b :  0 <= i_d < size_d,  0 <= b < itemsize }

Reference: the MPI standard, "Nonblocking communication": a buffer belongs to its operation until the operation is complete.
"""

import ctypes
import zlib

import torch

__all__ = ["checksum", "overlaps", "put_bytes", "raw_address", "reach", "share_memory", "take_bytes"]

_TENSOR, _STRIDED = torch.Tensor, torch.strided
# with these a tensor is nothing but its bytes, unless it is a view that negates; a complex one can be a view that conjugates
_RAW = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
# (address, how many) -> bytes, and (address, bytes, how many): for a small tensor a third of what torch takes for a copy
take_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
put_bytes = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value
)

_EXACT_BYTES = 2**26  # beyond this reach, tensors that may share bytes are taken to share none


def raw_address(x: torch.Tensor) -> int:
    """Where the bytes of `x` begin in this machine's memory, if they are all there is to it; 0 if not, or if it has none."""
    if x.__class__ is _TENSOR and x.is_cpu and x.layout is _STRIDED and x.dtype in _RAW and x.is_contiguous() and not x.is_neg():
        return x.data_ptr()
    return 0


def overlaps(x: torch.Tensor) -> bool:
    """Whether two elements of `x` may share memory, as those of an expanded tensor do."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` and `b` have a byte in common. Two columns of one matrix do not, though they lie between each other."""
    if a.is_contiguous() and b.is_contiguous():  # the usual case, asked for every exchange
        a_start, b_start, a_bytes, b_bytes = a.data_ptr(), b.data_ptr(), a.nbytes, b.nbytes
        return a_start < b_start + b_bytes and b_start < a_start + a_bytes and a_bytes > 0 < b_bytes
    (a_start, a_end), (b_start, b_end) = reach(a), reach(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    start, end = min(a_start, b_start), max(a_end, b_end)
    if end - start > _EXACT_BYTES:
        return False
    touched = torch.zeros(end - start, dtype=torch.bool)
    _bytes_of(a, touched, a_start - start).fill_(True)
    return bool(_bytes_of(b, touched, b_start - start).any())


def checksum(x: torch.Tensor) -> int:
    """A number that any plausible change of the bytes of `x` changes: small tensors by CRC, large ones by row and column sums.

    torch's own count of writes would not do: it is shared by all views of a tensor (a neighbour's write would be blamed), and
    misses writes through `.data` or numpy.
    """
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type != "cpu" or flat.numel() > 2**16:
        flat = flat.clone() if flat.storage_offset() % 8 else flat  # a view as int64 must begin on a whole one
        whole = flat[: flat.numel() // 8192 * 8192].view(torch.int64).view(-1, 1024)
        tail = flat[whole.numel() * 8 :]
        parts = torch.cat([whole.sum(0), whole.sum(1)]).view(torch.uint8).cpu(), tail.cpu()
    else:
        parts = (flat,)
    mark = 0
    for part in parts:
        mark = zlib.crc32(memoryview(part.clone().numpy()), mark)  # numpy() of x itself would pin its memory: never resized again
    return mark


def reach(x: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte to behind the last."""
    if x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _bytes_of(x: torch.Tensor, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """The elements of `memory`, one for a byte, that belong to `x`."""
    width = x.element_size()
    return memory.as_strided((*x.shape, width), (*(stride * width for stride in x.stride()), 1), offset)
