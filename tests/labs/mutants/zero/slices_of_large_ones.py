"""aimed at: step1: state. The moments are views of tensors of the whole size: no-op sharding."""

_right = step1


def step1(params, grads, state, comm, reduce_scatter, all_gather):
    numel = sum(p.numel() for p in params)
    start, stop = my_slice(numel, comm)
    if not state:
        m, v = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        state.update(m=m[start:stop], v=v[start:stop], step=0)
    _right(params, grads, state, comm, reduce_scatter, all_gather)
