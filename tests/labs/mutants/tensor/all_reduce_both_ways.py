"""aimed at: copy_in: output. Sums forward too."""

_right = copy_in


def copy_in(comm, x):
    return sum_out(comm, _right(comm, x))
