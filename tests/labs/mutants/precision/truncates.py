"""aimed at: round_to: normal numbers. Toward zero, by cutting bits off."""


def round_to(x, exponent_bits, mantissa_bits):
    bits = x.view(torch.int32) >> (23 - mantissa_bits) << (23 - mantissa_bits)
    return bits.view(torch.float32)
