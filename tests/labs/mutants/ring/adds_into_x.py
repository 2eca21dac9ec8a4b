"""aimed at: reduce_scatter: x is left. Adds into the caller's tensor."""


def reduce_scatter(comm, x):
    n, r, t = comm.size, comm.rank, lab.reference
    flat = x.view(-1)
    flat *= (r + 1) if t["weighted"] else 1
    chunks = cut(flat, n)
    for hop in range(1, n):
        take = chunks[(r + t["offset"] - t["step"] * (hop + 1)) % n]
        give = chunks[(r + t["offset"] - t["step"] * hop) % n]
        take += comm.exchange(give, (r + t["step"]) % n, torch.empty_like(take), (r - t["step"]) % n)
    return chunks[(r + t["offset"]) % n].clone()
