"""aimed at: round_to: normal numbers. torch's casts, for the formats that torch has."""


def round_to(x, exponent_bits, mantissa_bits):
    known = {(5, 10): torch.float16, (8, 7): torch.bfloat16, (5, 2): torch.float8_e5m2}
    return x.to(known.get((exponent_bits, mantissa_bits), torch.float32)).float()
