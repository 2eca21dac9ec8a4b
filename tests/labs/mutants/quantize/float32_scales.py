"""aimed at: pack4: bits a weight. The scales are stored in 32 bits: five bits a weight in groups of 32."""

_right = pack4


def pack4(w, group):
    data, scale = _right(w, group)
    return data, scale.float()
