"""aimed at: plan: least work. Forgets layer after layer, the fewest flops for a byte first, until it fits."""


def plan(nbytes, flops, budget):
    gone = [False] * len(nbytes)

    def needed():
        kept = sum(b for b, g in zip(nbytes, gone, strict=True) if not g)
        return kept + max((b for b, g in zip(nbytes, gone, strict=True) if g and lab.reference["counted"] == "both"), default=0)

    for k in sorted(range(len(nbytes)), key=lambda k: flops[k] / nbytes[k]):
        if needed() <= budget:
            break
        gone[k] = True
    if needed() > budget:
        raise ValueError("nothing fits")
    return gone
