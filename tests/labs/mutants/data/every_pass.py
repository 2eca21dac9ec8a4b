"""aimed at: overlap: one sum a step. Sums after every micro-batch what backward has added up so far; the last one is right."""

_right = overlap


def overlap(model, comm, buckets, begin, passes):
    finishers = [_right(model, comm, buckets, begin, k) for k in range(1, passes + 1)]
    params = [p for bucket in buckets for p in bucket]

    def finish():
        own = [p.grad for p in params]
        for each in finishers:
            for p, grad in zip(params, own, strict=True):
                p.grad = grad
            each()

    return finish
