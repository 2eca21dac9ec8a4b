"""aimed at: all_reduce: values. The library's own."""


def all_reduce(comm, x):
    from fourwalls.collectives import ring

    return ring.all_reduce(comm, x)
