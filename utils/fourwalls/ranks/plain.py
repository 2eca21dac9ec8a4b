"""Plain data over a pipe to somebody who is not trusted: tensors, numbers, texts, lists and dicts, and nothing that can act.

What arrives is rebuilt from its description and raw bytes, so an object with a clever `__eq__`, a subclass of a tensor or a
pickle that runs code cannot pass: it is refused where it is sent, or it arrives as the plain tensor that it holds.

    frame = length of head (8 bytes) + length of body (8 bytes) + head (JSON) + body (the bytes of all tensors, in order)

Reference: the Python documentation of pickle, "Warning: the pickle module is not secure".
"""

import json
import math
import struct

import torch

__all__ = ["MOST_BYTES", "NotPlain", "pack", "read", "unpack", "write"]

MOST_BYTES = 256 * 2**20  # of one frame: more is a mistake, or an attack on the reader's memory
MOST_DEEP = 12
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8)
    + (torch.uint8, torch.bool, torch.complex64, torch.complex128)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTHS = struct.Struct("<QQ")


class NotPlain(ValueError):
    """Something that is neither a tensor, number, text, None, nor a list, tuple or dict of such."""


def pack(value) -> tuple[bytes, list]:
    """(head, buffers) of a value. Tensors (parameters and other subclasses too) go as shape, dtype and bytes.

    Raises NotPlain, which names the type, for anything that is not plain.
    """
    buffers: list = []
    return json.dumps(_describe(value, buffers, 0), allow_nan=False).encode(), buffers


def unpack(head: bytes, body: memoryview):
    """The value that was packed. Raises NotPlain for a frame that is not one."""
    try:
        described = json.loads(head)
    except ValueError:
        raise NotPlain("a frame whose head is not JSON") from None
    try:
        value, used = _rebuild(described, body, 0, 0)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise error if isinstance(error, NotPlain) else NotPlain(f"a frame that cannot be read: {error}") from None
    if used != len(body):
        raise NotPlain(f"a frame with {len(body) - used} bytes too many")
    return value


def write(stream, value) -> None:
    """Send one value over a socket."""
    head, buffers = pack(value)
    body = sum(len(b) for b in buffers)
    if body + len(head) > MOST_BYTES:
        raise NotPlain(f"{body} bytes at once; at most {MOST_BYTES}")
    stream.sendall(_LENGTHS.pack(len(head), body) + head)
    for buffer in buffers:
        stream.sendall(buffer)


def read(stream):
    """The next value from a socket. EOFError where the other side has gone; TimeoutError after the socket's own timeout."""
    head, body = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size))
    if head + body > MOST_BYTES:
        raise NotPlain(f"a frame of {head + body} bytes; at most {MOST_BYTES}")
    whole = _exactly(stream, head + body)
    return unpack(bytes(whole[:head]), memoryview(whole)[head:])


def _exactly(stream, count: int) -> bytearray:
    found = bytearray(count)
    view, done = memoryview(found), 0
    while done < count:
        got = stream.recv_into(view[done:])
        if not got:
            raise EOFError("the other side has gone")
        done += got
    return found


def _describe(value, buffers, depth):
    kind = type(value)
    if depth > MOST_DEEP:
        raise NotPlain(f"lists within lists, more than {MOST_DEEP} deep")
    if value is None or kind in (bool, int, str):
        return {"v": value} if kind is not int or abs(value) < 2**63 else {"i": str(value)}
    if kind is float:
        return {"v": value} if math.isfinite(value) else {"f": repr(value)}
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value, buffers)
    if kind in (list, tuple):
        return {"l" if kind is list else "t": [_describe(v, buffers, depth + 1) for v in value]}
    if kind is dict and all(type(k) in (str, int) for k in value):
        return {"d": [[k, _describe(v, buffers, depth + 1)] for k, v in value.items()]}
    raise NotPlain(f"a {kind.__name__}; wanted are tensors, numbers, texts, None, and lists, tuples or dicts of them")


def _describe_tensor(value, buffers):
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        dtype = _NAMES.get(value.dtype)
        if dtype is None or value.layout != torch.strided:
            raise NotPlain(f"a {value.layout} tensor of {value.dtype}; wanted is a dense one of {', '.join(DTYPES)}")
        plain = value.detach().as_subclass(torch.Tensor)
        shape = list(plain.shape)
        if plain.is_meta:
            return {"x": [dtype, shape, "meta"]}
        plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)
        buffers.append(memoryview(raw.numpy()))
        return {"x": [dtype, shape, "cpu"]}


def _rebuild(described, body, at, depth):
    if depth > MOST_DEEP or type(described) is not dict or len(described) != 1:
        raise NotPlain("a frame with an unknown description")
    ((kind, value),) = described.items()
    if kind == "v" and (value is None or type(value) in (bool, int, str, float)):
        return value, at
    if kind == "i" and type(value) is str and len(value) < 1000:
        return int(value), at
    if kind == "f" and value in ("nan", "inf", "-inf"):
        return float(value), at
    if kind == "x":
        return _rebuild_tensor(value, body, at)
    if kind in ("l", "t") and type(value) is list:
        items = []
        for v in value:
            item, at = _rebuild(v, body, at, depth + 1)
            items.append(item)
        return (items if kind == "l" else tuple(items)), at
    if kind == "d" and type(value) is list:
        pairs = {}
        for k, v in value:
            pairs[k], at = _rebuild(v, body, at, depth + 1)
        return pairs, at
    raise NotPlain("a frame with an unknown description")


def _rebuild_tensor(value, body, at):
    dtype, shape, where = value
    if dtype not in DTYPES or where not in ("cpu", "meta") or not all(type(n) is int and n >= 0 for n in shape):
        raise NotPlain("a frame with a tensor of no known form")
    if where == "meta":
        return torch.empty(shape, dtype=DTYPES[dtype], device="meta"), at
    end = at + math.prod(shape) * DTYPES[dtype].itemsize
    if end > len(body):
        raise NotPlain("a frame that ends within a tensor")
    flat = torch.frombuffer(bytearray(body[at:end]), dtype=DTYPES[dtype]) if end > at else torch.empty(0, dtype=DTYPES[dtype])
    return flat.reshape(shape), end
