"""aimed at: sum_out: gradient. The twin of the wrong side: t times too large."""

_right = sum_out


def sum_out(comm, x):
    return copy_in(comm, _right(comm, x))
