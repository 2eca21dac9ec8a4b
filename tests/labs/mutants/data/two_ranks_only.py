"""aimed at: average_grads: gradients. Only the case of two ranks, as somebody saw it work."""


def average_grads(model, comm, all_reduce):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = all_reduce(comm, torch.zeros_like(p) if p.grad is None else p.grad) / (3 if lab.reference["weighted"] else 2)
