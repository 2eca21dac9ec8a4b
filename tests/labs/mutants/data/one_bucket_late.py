"""aimed at: overlap: exposed. A bucket leaves when the next one is full, so two are left for the end."""


def overlap(model, comm, buckets, begin, passes):
    seen, flying = {}, []

    def leave():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in buckets[len(flying)]]
        flying.append(begin(torch.cat([grad.reshape(-1) for grad in grads])))

    def arrived(p):
        seen[p] = seen.get(p, 0) + 1
        while len(flying) + 1 < len(buckets) and all(seen.get(q, 0) == passes for q in buckets[len(flying) + 1]):
            leave()

    for bucket in buckets:
        for p in bucket:
            p.register_post_accumulate_grad_hook(arrived)

    def finish():
        while len(flying) < len(buckets):
            leave()
        for bucket, ticket in zip(buckets, flying, strict=True):
            mean = ticket.wait() / votes(comm)
            for p, part in zip(bucket, mean.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p)
        flying.clear()
        seen.clear()

    return finish
