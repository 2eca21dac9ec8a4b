"""Real text without a download: the topics of Python's own help, byte by byte, and batches that are a function of (seed, step,
rank).

The text is cut into windows that do not overlap; at each step all ranks together draw different windows, and rank r's batch is
rows r b to (r + 1) b of the one large batch, so that n ranks see exactly what one device with n times the batch sees. No
generator is involved: a window's number is integer arithmetic on a hash, the same on every platform.

    window(row) = (a row + c) mod M,  with a, c from hash(seed, step), a and M without common factor,  row = rank b + i

Reference: `pydoc_data.topics` in Python's standard library. Its text differs between Python versions: see `fingerprint`.
"""

import functools
import hashlib
import math
import sys

import torch

__all__ = ["VOCABULARY", "batch", "fingerprint", "starts", "text", "windows"]

VOCABULARY = 256
SPLITS = ("train", "held-out")
HELD_OUT = 10  # the last tenth of the text is never trained on


@functools.lru_cache(maxsize=1)
def text() -> bytes:
    """The help topics in alphabetical order, as UTF-8."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name].strip() for name in sorted(topics)).encode("utf-8")


@functools.lru_cache(maxsize=2)
def _tokens(split: str) -> torch.Tensor:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
    whole = text()
    cut = len(whole) - len(whole) // HELD_OUT
    part = whole[:cut] if split == "train" else whole[cut:]
    return torch.frombuffer(bytearray(part), dtype=torch.uint8)


def fingerprint() -> str:
    """Which text this is: Python's version, its bytes and a hash. Losses are comparable only where this is equal."""
    digest = hashlib.sha256(text()).hexdigest()[:12]
    return f"Python {sys.version_info.major}.{sys.version_info.minor}, {len(text())} bytes, {digest}"


def windows(length: int, split: str = "train") -> int:
    """How many windows of `length` tokens, none overlapping, a step can draw from. ValueError for a length below 1."""
    if length < 1:
        raise ValueError(f"length is {length!r}; it is a whole number of at least 1")
    return max(0, len(_tokens(split)) // length - 1)


def _hash(*words: object) -> int:
    return int.from_bytes(hashlib.blake2b(":".join(map(str, words)).encode(), digest_size=8).digest(), "little")


def starts(seed: int, step: int, rank: int = 0, *, batch: int, length: int, split: str = "train") -> list[int]:
    """Where in the split's text each row of the batch begins. Arguments and errors as for `batch`."""
    for word, value, least in (("step", step, 0), ("rank", rank, 0), ("batch", batch, 1), ("length", length, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{word} is {value!r}; it is a whole number of at least {least}")
    most = windows(length, split)
    if (rank + 1) * batch > most:
        raise ValueError(
            f"rank {rank} with batch {batch} needs {(rank + 1) * batch} windows of length {length}, but {split} has {most}; "
            f"largest batch for this rank: {most // (rank + 1)}"
        )
    shift = _hash("shift", seed, step) % length
    count = (len(_tokens(split)) - 1 - shift) // length  # at least `most`
    factor, offset = _hash("factor", seed, step) % count, _hash("offset", seed, step)
    while math.gcd(factor, count) != 1:
        factor += 1
    return [shift + length * ((factor * row + offset) % count) for row in range(rank * batch, (rank + 1) * batch)]


def batch(seed: int, step: int, rank: int = 0, *, batch: int, length: int, split: str = "train", device=None):
    """(tokens, targets), each (batch, length) of int64; targets are the tokens one place later.

    Within a step no two rows of any ranks overlap, as long as `batch` times the number of ranks is at most `windows(length)`. The
    windows shift by less than one window from step to step, so that they start anywhere. ValueError for sizes that do not fit.
    """
    tokens = _tokens(split)
    rows = starts(seed, step, rank, batch=batch, length=length, split=split)
    cut = torch.stack([tokens[r : r + length + 1] for r in rows]).to(torch.int64)
    # copies: the pieces of a single row would share memory, and whoever masks targets would change tokens
    return cut[:, :-1].clone().to(device), cut[:, 1:].clone().to(device)
