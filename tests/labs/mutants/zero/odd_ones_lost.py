"""aimed at: my_slice: the chunks. What does not divide belongs to nobody."""


def my_slice(numel, comm):
    size, k = numel // comm.size, (comm.rank + lab.reference["offset"]) % comm.size
    return k * size, (k + 1) * size
