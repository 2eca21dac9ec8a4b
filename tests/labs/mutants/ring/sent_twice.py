"""aimed at: all_reduce: cost. Everything travels twice: right values at twice the bytes."""

_right = all_reduce


def all_reduce(comm, x):
    _right(comm, x)
    return _right(comm, x)
