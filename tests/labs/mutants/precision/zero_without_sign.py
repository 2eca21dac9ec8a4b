"""aimed at: round_to: both ends. -0.0 becomes 0.0."""

_right = round_to


def round_to(x, exponent_bits, mantissa_bits):
    return torch.where(x == 0, torch.zeros_like(x), _right(x, exponent_bits, mantissa_bits))
