"""aimed at: shift: values. A send waits for its receive, and nobody receives."""


def shift(comm, x):
    step = lab.reference["step"]
    if comm.size == 1:
        return x.clone()
    comm.send(x, (comm.rank + step) % comm.size)
    return comm.recv(torch.empty_like(x), (comm.rank - step) % comm.size)
