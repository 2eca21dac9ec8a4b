"""aimed at: pack4: values. Rounded with the scale before it was stored in bfloat16."""

import torch.nn.functional as F


def pack4(w, group):
    n, k = w.shape
    empty, full = -k % group, lab.reference["range"] == "full"
    left = empty if lab.reference["short"] == "first" else 0
    wide = F.pad(w, (left, empty - left)).reshape(-1, group)
    scale = quantize(wide, 4, 0)[1]
    q = (wide / scale).round().clamp(-8 if full else -7, 7).reshape(n, -1)[:, left : left + k]
    halves = F.pad((q + 8).to(torch.uint8), (0, k % 2))
    low, high = halves[:, ::2], halves[:, 1::2]
    if lab.reference["low"] == "odd":
        low, high = high, low
    return low | high << 4, scale.bfloat16().reshape(n, -1)
