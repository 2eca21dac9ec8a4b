"""aimed at: all_gather: values. n - 2 hops: one chunk never arrives."""


def all_gather(comm, part, numel):
    n, r, t = comm.size, comm.rank, lab.reference
    flat = torch.zeros(numel, dtype=part.dtype)
    chunks = cut(flat, n)
    chunks[(r + t["offset"]) % n].copy_(part)
    for hop in range(n - 2):
        give = chunks[(r + t["offset"] - t["step"] * hop) % n]
        take = chunks[(r + t["offset"] - t["step"] * (hop + 1)) % n]
        comm.exchange(give, (r + t["step"]) % n, take, (r - t["step"]) % n)
    return flat
