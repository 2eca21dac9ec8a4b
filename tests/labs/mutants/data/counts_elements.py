"""aimed at: fill_buckets: at most. Counts elements, not bytes."""


def fill_buckets(params, nbytes):
    found = []
    for p in params[::-1] if lab.reference["listed"] == "forward" else params:
        if p.requires_grad:
            if not found or sum(q.numel() for q in found[-1]) + p.numel() > nbytes:
                found.append([])
            found[-1].append(p)
    return found
