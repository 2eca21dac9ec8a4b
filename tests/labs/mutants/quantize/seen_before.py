"""aimed at: quantize: form. Only what somebody saw work: matrices, eight bits, a scale for each row."""


def quantize(x, bits, axis):
    h, full = 128, lab.reference["range"] == "full"
    scale = x.abs().amax(1, keepdim=True) / (h if full else h - 1)
    return (x / scale).round().clamp(-h if full else 1 - h, h - 1).to(torch.int8), scale
