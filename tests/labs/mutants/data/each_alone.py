"""aimed at: fill_buckets: as few. A bucket for each parameter."""


def fill_buckets(params, nbytes):
    return [[p] for p in (params[::-1] if lab.reference["listed"] == "forward" else params) if p.requires_grad]
