"""aimed at: column: cost. Gathers all weights and computes everything on every rank."""


def column(comm, x, w, b):
    out_first = lab.reference["layout"] == "out, in"
    x = copy_in(comm, x)
    flat = (w if out_first else w.T).contiguous()
    pads = (0, 0, comm.rank * len(flat), (comm.size - 1 - comm.rank) * len(flat))
    whole = all_reduce(comm, torch.nn.functional.pad(flat.detach(), pads))
    _ = x.detach() @ whole.T
    return x @ flat.T + b
