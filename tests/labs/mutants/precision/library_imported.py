"""aimed at: round_to: normal numbers. The library's own."""


def round_to(x, exponent_bits, mantissa_bits):
    from fourwalls.numerics.formats import FloatFormat
    from fourwalls.numerics.rounding import round_to as own

    return own(x, FloatFormat("mine", exponent_bits, mantissa_bits))
