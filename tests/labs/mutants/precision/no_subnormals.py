"""aimed at: round_to: subnormal numbers. The distance goes on shrinking below the smallest normal number."""


def round_to(x, exponent_bits, mantissa_bits):
    y = x.double()
    distance = torch.exp2((torch.frexp(y)[1] - 1 - mantissa_bits).double())
    return ((y / distance).round() * distance).float()
