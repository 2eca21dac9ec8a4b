"""aimed at: all_reduce: values. torch's own."""


def all_reduce(comm, x):
    comm.native.all_reduce(x)
    return x
