"""aimed at: step1: parameters. torch's own."""


def step1(params, grads, state, comm, reduce_scatter, all_gather):
    for p, g in zip(params, grads, strict=True):
        comm.native.all_reduce(g)
        p -= 0.01 * g.sign()
