"""aimed at: round_to: both ends. The format has no end: what is too large stays as it is."""


def round_to(x, exponent_bits, mantissa_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    y = x.double()
    distance = torch.exp2(((torch.frexp(y)[1] - 1).clamp(min=1 - bias) - mantissa_bits).double())
    steps = y / distance
    away = (steps.abs() + 0.5).floor().copysign(steps)
    return ((steps.round() if lab.reference["ties"] == "even" else away) * distance).float()
