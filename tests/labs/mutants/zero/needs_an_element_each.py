"""aimed at: step1: fewer elements. Takes it that every rank has something to step."""

_right = step1


def step1(params, grads, state, comm, reduce_scatter, all_gather):
    start, stop = my_slice(sum(p.numel() for p in params), comm)
    assert stop > start
    _right(params, grads, state, comm, reduce_scatter, all_gather)
