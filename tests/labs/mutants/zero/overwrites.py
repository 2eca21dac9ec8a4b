"""aimed at: reduce_grads2: two backwards. The second micro-batch takes the place of the first."""


def reduce_grads2(params, comm, reduce_scatter):
    mine = [None] * len(params)

    def arrived(p, k):
        mine[k] = reduce_scatter(comm, p.grad.reshape(-1)) / votes(comm)
        p.grad = None

    for k, p in enumerate(params):
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, k=k: arrived(p, k))
    return mine
