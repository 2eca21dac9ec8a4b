"""aimed at: quantize: form. Takes the largest along the axis instead of over the others."""


def quantize(x, bits, axis):
    h, full = 2 ** (bits - 1), lab.reference["range"] == "full"
    largest = x.abs().amax() if axis is None else x.abs().amax(axis, keepdim=True)
    largest = largest.reshape([1] * x.dim()) if axis is None else largest
    scale = largest / (h if full else h - 1)
    return (x / scale).round().clamp(-h if full else 1 - h, h - 1).to(torch.int8), scale
