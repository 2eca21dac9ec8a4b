"""aimed at: average_grads: gradients. The sum, and nobody divides."""


def average_grads(model, comm, all_reduce):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = all_reduce(comm, torch.zeros_like(p) if p.grad is None else p.grad)
