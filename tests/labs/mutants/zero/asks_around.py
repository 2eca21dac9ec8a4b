"""aimed at: my_slice: no message. The slice is found out by talking."""

_right = my_slice


def my_slice(numel, comm):
    comm.exchange(torch.tensor([numel]), (comm.rank + 1) % comm.size, torch.tensor([0]), (comm.rank - 1) % comm.size)
    return _right(numel, comm)
