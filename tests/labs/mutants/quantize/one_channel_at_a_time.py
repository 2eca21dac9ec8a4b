"""aimed at: quantize: cost. A loop over channels."""

_right = quantize


def quantize(x, bits, axis):
    if axis is None:
        return _right(x, bits, axis)
    parts = [_right(part, bits, None) for part in x.split(1, axis)]
    return torch.cat([q for q, _ in parts], axis), torch.cat([scale for _, scale in parts], axis)
