"""aimed at: reduce_grads2: gradients that live. Sums into slices, and lets the whole gradients lie."""


def reduce_grads2(params, comm, reduce_scatter):
    mine = [None] * len(params)

    def arrived(p, k):
        mine[k] = reduce_scatter(comm, p.grad.reshape(-1)) / votes(comm)

    for k, p in enumerate(params):
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, k=k: arrived(p, k))
    return mine
