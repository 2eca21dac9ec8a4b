"""aimed at: sum_out: output. The library's own conjugate function."""


def sum_out(comm, x):
    from fourwalls.collectives.autograd import reduce_from

    return reduce_from(comm, x)
