"""aimed at: average_grads: gradients. The library's own."""


def average_grads(model, comm, all_reduce):
    from fourwalls.parallel.data import DataParallel

    DataParallel(model, comm, all_reduce=all_reduce, unused="zeros").synchronise()
