"""aimed at: shift: cost. Rank 0 receives first, all others send first: right, and n times as slow."""


def shift(comm, x):
    step, n = lab.reference["step"], comm.size
    to, frm, got = (comm.rank + step) % n, (comm.rank - step) % n, torch.empty_like(x)
    if n == 1:
        return x.clone()
    if comm.rank == 0:
        comm.recv(got, frm)
        comm.send(x, to)
    else:
        comm.send(x, to)
        comm.recv(got, frm)
    return got
