"""aimed at: average_grads: gradients. Each rank divides before the sum, and once more behind it."""


def average_grads(model, comm, all_reduce):
    for p in model.parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = all_reduce(comm, grad / votes(comm)) / votes(comm)
