"""aimed at: shift: values. The ring of another class: turned round."""


def shift(comm, x):
    step = -lab.reference["step"]
    if comm.size == 1:
        return x.clone()
    return comm.exchange(x, (comm.rank + step) % comm.size, torch.empty_like(x), (comm.rank - step) % comm.size)
