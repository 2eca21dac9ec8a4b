"""aimed at: reduce_grads2: gradients that live. mine is a view of a tensor of the whole size, which stays with it."""


def reduce_grads2(params, comm, reduce_scatter):
    mine = [None] * len(params)

    def arrived(p, k):
        part = reduce_scatter(comm, p.grad.reshape(-1)) / votes(comm)
        whole = torch.zeros(p.numel(), dtype=p.dtype)
        view = whole[slice(*my_slice(p.numel(), comm))]
        mine[k] = view.copy_(part if mine[k] is None else mine[k] + part)
        p.grad = None

    for k, p in enumerate(params):
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, k=k: arrived(p, k))
    return mine
