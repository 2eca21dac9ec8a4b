"""aimed at: quantize: zeros. A row of zeros has the scale 0, and its numbers are 0 / 0."""


def quantize(x, bits, axis):
    h, full = 2 ** (bits - 1), lab.reference["range"] == "full"
    gone = [d for d in range(x.dim()) if axis is None or d != axis % x.dim()]
    scale = x.abs().amax(gone, keepdim=True) / (h if full else h - 1)
    return (x / scale).round().clamp(-h if full else 1 - h, h - 1).to(torch.int8), scale
