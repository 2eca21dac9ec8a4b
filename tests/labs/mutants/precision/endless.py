"""aimed at: round_to: normal numbers. A loop without end."""


def round_to(x, exponent_bits, mantissa_bits):
    while True:
        pass
