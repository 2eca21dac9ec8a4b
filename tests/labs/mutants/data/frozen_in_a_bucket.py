"""aimed at: fill_buckets: every trained. Frozen parameters are in it, and such a bucket is never full."""


def fill_buckets(params, nbytes):
    found = []
    for p in params[::-1] if lab.reference["listed"] == "forward" else params:
        if not found or sum(q.nbytes for q in found[-1]) + p.nbytes > nbytes:
            found.append([])
        found[-1].append(p)
    return found
