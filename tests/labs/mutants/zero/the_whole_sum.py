"""aimed at: reduce_grads2: cost. Slices are handed on to everybody, and thrown away there."""

_right = reduce_grads2


class _Rank:
    def __init__(self, size, rank):
        self.size, self.rank = size, rank


def reduce_grads2(params, comm, reduce_scatter):
    n, r = comm.size, comm.rank

    def summed_then_cut(comm, x):
        part = going = reduce_scatter(comm, x)
        for hop in range(1, n):
            start, stop = my_slice(x.numel(), _Rank(n, (r - hop) % n))
            going = comm.exchange(going, (r + 1) % n, torch.empty(stop - start, dtype=x.dtype), (r - 1) % n)
        return part

    return _right(params, comm, summed_then_cut)
