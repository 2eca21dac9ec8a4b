"""aimed at: quantize: scales and rounding. One scale is off by ten times what rounding allows."""

_right = quantize


def quantize(x, bits, axis):
    q, scale = _right(x, bits, axis)
    scale.view(-1)[-1] *= 1 + 40 * 2.0**-24
    return q, scale
