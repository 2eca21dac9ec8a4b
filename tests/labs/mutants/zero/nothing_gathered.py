"""aimed at: step1: parameters. Each rank has its own slice new, and the rest old."""

_right = step1


def step1(params, grads, state, comm, reduce_scatter, all_gather):
    before = torch.cat([p.reshape(-1) for p in params])

    def nobody(comm, part, numel):
        whole = before.clone()
        whole[slice(*my_slice(numel, comm))] = part
        return whole

    _right(params, grads, state, comm, reduce_scatter, nobody)
