"""aimed at: my_slice: the chunks. Those of another class: chunk r, the first ones longer."""


def my_slice(numel, comm):
    size, odd = divmod(numel, comm.size)
    start = comm.rank * size + min(comm.rank, odd)
    return start, start + size + (comm.rank < odd)
