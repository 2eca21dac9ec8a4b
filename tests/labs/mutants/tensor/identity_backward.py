"""aimed at: copy_in: gradient. A plain copy: the gradient is one rank's share."""


def copy_in(comm, x):
    return x.view_as(x)
