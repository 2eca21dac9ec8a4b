"""aimed at: round_to: cost. A loop over the numbers."""

_right = round_to


def round_to(x, exponent_bits, mantissa_bits):
    return torch.stack([_right(number, exponent_bits, mantissa_bits) for number in x])
