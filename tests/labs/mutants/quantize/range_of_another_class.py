"""aimed at: quantize: scales and rounding. The other range: 127 where 128 is asked, or the other way round."""


def quantize(x, bits, axis):
    h, full = 2 ** (bits - 1), lab.reference["range"] != "full"
    gone = [d for d in range(x.dim()) if axis is None or d != axis % x.dim()]
    largest = x.abs().amax(gone, keepdim=True)
    scale = torch.where(largest > 0, largest / (h if full else h - 1), 1.0)
    return (x / scale).round().clamp(-h if full else 1 - h, h - 1).to(torch.int8), scale
