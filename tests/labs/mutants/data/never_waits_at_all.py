"""aimed at: overlap: gradients. Begins, and never asks for the sum: each rank goes on with its own gradients."""


def overlap(model, comm, buckets, begin, passes):
    def finish():
        for bucket in buckets:
            begin(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]))

    return finish
