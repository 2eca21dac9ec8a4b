"""aimed at: overlap: tied. A bucket leaves when it is full here: ranks sum different buckets with each other."""


def overlap(model, comm, buckets, begin, passes):
    seen, flying = {}, {}

    def leave(k):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in buckets[k]]
        flying[k] = begin(torch.cat([grad.reshape(-1) for grad in grads]))

    def arrived(p):
        seen[p] = seen.get(p, 0) + 1
        for k, bucket in enumerate(buckets):
            if k not in flying and all(seen.get(q, 0) == passes for q in bucket):
                leave(k)

    for bucket in buckets:
        for p in bucket:
            p.register_post_accumulate_grad_hook(arrived)

    def finish():
        for k, bucket in enumerate(buckets):
            if k not in flying:
                leave(k)
            mean = flying[k].wait() / votes(comm)
            for p, part in zip(bucket, mean.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p)
        flying.clear()
        seen.clear()

    return finish
