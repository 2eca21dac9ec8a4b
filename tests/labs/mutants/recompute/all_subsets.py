"""aimed at: plan: many layers. All 2^L plans are tried."""


def plan(nbytes, flops, budget):
    best, layers = None, range(len(nbytes))
    for gone in range(2 ** len(nbytes)):
        kept = sum(nbytes[k] for k in layers if not gone >> k & 1)
        again = max((nbytes[k] for k in layers if gone >> k & 1 and lab.reference["counted"] == "both"), default=0)
        extra = sum(flops[k] for k in layers if gone >> k & 1)
        if kept + again <= budget and (best is None or extra < best[0]):
            best = extra, gone
    if best is None:
        raise ValueError("nothing fits")
    return [bool(best[1] >> k & 1) for k in layers]
