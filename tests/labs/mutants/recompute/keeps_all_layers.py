"""aimed at: plan: fits. Nothing is forgotten."""


def plan(nbytes, flops, budget):
    if budget < max(nbytes):
        raise ValueError("nothing fits")
    return [False] * len(nbytes)
