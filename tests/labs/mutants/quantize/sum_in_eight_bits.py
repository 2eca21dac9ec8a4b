"""aimed at: int8_linear: the sum is exact. The product of int8 is int8: it goes round at 128."""


def int8_linear(xq, sx, wq, sw):
    return (xq @ wq.T).float() * sx * sw.T
