"""aimed at: round_to: normal numbers. One number of all lands on the neighbour of the nearest."""

_right = round_to


def round_to(x, exponent_bits, mantissa_bits):
    y = _right(x, exponent_bits, mantissa_bits)
    y[-1] *= 1 + 2.0**-mantissa_bits
    return y
