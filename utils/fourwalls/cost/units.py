"""Bytes, FLOPs and seconds with their units on, so that 16 GB and 16 GiB are never taken for one another.

Decimal prefixes (kB, MB, GB, TB) count in thousands, binary ones (KiB, MiB, GiB, TiB) in 1024s; a bare "16M" is refused, because
readers differ on what it means.

    1 GiB = 1024^3 B = 1.074 GB

Reference: IEC 80000-13.
"""

import re
from numbers import Real

__all__ = ["BINARY", "DECIMAL", "both", "format_bytes", "format_count", "format_seconds", "gb", "gib", "parse_bytes"]

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_UNITS = {name.lower(): size for name, size in {**DECIMAL, **BINARY}.items()}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """ "16MiB" -> 16777216, "1GB" -> 1000000000, "512" or 512 -> 512. Upper and lower case are the same (b is a byte, never a
    bit).

    ValueError for a unit that does not exist, a bare prefix ("16M"), a negative size, or a size that is not whole bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"{text} bytes; a size is at least 0")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is no size in bytes; write for instance 4KiB, 16MiB, 1GB or 512")
    number, unit = match.groups()
    size = _UNITS.get(unit.lower() or "b")
    if size is None:
        letter = unit[0].upper()
        guess = (
            f"{number}{letter}iB or {number}{'k' if letter == 'K' else letter}B"
            if letter in "KMGTP"
            else f"{number}B, {number}KiB or {number}MiB"
        )
        raise ValueError(f"{text!r}: no unit {unit!r}; write {guess}")
    whole, _, part = number.replace("_", "").partition(".")
    scaled = int((whole or "0") + part) * size
    if scaled % 10 ** len(part):
        raise ValueError(f"{text!r} is not a whole number of bytes; the nearest is {round(scaled / 10 ** len(part))}")
    return scaled // 10 ** len(part)


def format_bytes(nbytes: Real, *, binary: bool = True, digits: int = 2) -> str:
    """1610612736 -> "1.50 GiB", or "1.61 GB" with binary=False. Bytes below one unit stay whole: "512 B"."""
    units = BINARY if binary else DECIMAL
    name, size = max(((n, s) for n, s in units.items() if s <= max(abs(nbytes), 1)), key=lambda item: item[1])
    if size == 1:
        return f"{float(nbytes):g} B"
    # 1023.999 MiB must not print as 1024.00 MiB
    if round(abs(nbytes) / size, digits) >= (1024 if binary else 1000):
        larger = [(n, s) for n, s in units.items() if s > size]
        name, size = larger[0] if larger else (name, size)
    return f"{float(nbytes / size):.{digits}f} {name}"


def both(nbytes: Real, *, digits: int = 2) -> str:
    """Decimal and binary side by side: "200.00 TB = 181.90 TiB"."""
    return f"{format_bytes(nbytes, binary=False, digits=digits)} = {format_bytes(nbytes, digits=digits)}"


def gb(nbytes: Real) -> float:
    """Bytes in decimal gigabytes (10^9)."""
    return float(nbytes / 10**9)


def gib(nbytes: Real) -> float:
    """Bytes in binary gibibytes (2^30)."""
    return float(nbytes / 2**30)


def format_count(value: Real, unit: str = "", *, digits: int = 4) -> str:
    """4.511e18, "FLOP" -> "4.511 EFLOP"; 174.6e9 -> "174.6 G". Prefixes are decimal."""
    for prefix, size in (("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * (1 - 0.5 * 10.0**-digits):
            return f"{float(value) / size:.{digits}g} {prefix}{unit}"
    return f"{float(value):.{digits}g} {unit}".rstrip()


def format_seconds(seconds: Real, *, digits: int = 3) -> str:
    """0.0000123 -> "12.3 us"; 2937600 -> "34 days"."""
    for name, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= size * (2 if name in ("days", "h", "min") else 1):
            return f"{float(seconds) / size:.{digits}g} {name}"
    return f"{float(seconds) / 1e-12:.{digits}g} ps"
