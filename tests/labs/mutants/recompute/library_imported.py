"""aimed at: checkpoint: values. The library's own."""


def checkpoint(fn, *xs):
    from fourwalls.memory.recompute import checkpoint as own

    return own(fn, *xs)
