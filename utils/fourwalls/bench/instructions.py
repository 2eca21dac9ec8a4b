"""What a processor can multiply in few bits: the words of its own list that decide whether 16 or 8 bits are fast.

    bf16 fast  <=>  avx512_bf16, amx_bf16 or (Arm) bf16        int8 fast  <=>  avx_vnni, avx512_vnni, amx_int8 or (Arm) i8mm

Reference: the kernel's /proc/cpuinfo; oneDNN, "CPU dispatcher control".
"""

from pathlib import Path

__all__ = ["WORDS", "instructions"]

WORDS = (
    "f16c", "fma", "avx2", "avx512f", "avx512_fp16", "avx512_bf16", "avx_vnni", "avx512_vnni",
    "amx_bf16", "amx_fp16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm",
)  # fmt: skip


def instructions(text: str | None = None) -> str:
    """The words of WORDS that this processor lists, joined by spaces; "unknown" where it lists nothing. text: for a test."""
    if text is None:
        try:
            text = Path("/proc/cpuinfo").read_text()
        except OSError:
            return "unknown"
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    found = set(lines[0].split(":", 1)[-1].split()) if lines else set()
    return " ".join(word for word in WORDS if word in found) or "unknown"
