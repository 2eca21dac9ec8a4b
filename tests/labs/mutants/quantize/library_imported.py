"""aimed at: pack4: form. The library's own."""


def pack4(w, group):
    from fourwalls.numerics import packing

    packed = packing.pack4(w, group)
    return packed.data, packed.scale
