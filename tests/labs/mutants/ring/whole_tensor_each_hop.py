"""aimed at: reduce_scatter: cost. The whole tensor on every hop: right values, n times the bytes."""


def reduce_scatter(comm, x):
    n, r, t = comm.size, comm.rank, lab.reference
    mine = x.reshape(-1) * ((r + 1) if t["weighted"] else 1)
    total, going = mine.clone(), mine.clone()
    for _ in range(n - 1):
        going = comm.exchange(going, (r + t["step"]) % n, torch.empty_like(going), (r - t["step"]) % n).clone()
        total += going
    return cut(total, n)[(r + t["offset"]) % n].clone()
