"""aimed at: average_grads: over the all_reduce that was given. What was handed in is not used."""


def average_grads(model, comm, all_reduce):
    weight = comm.rank + 1 if lab.reference["weighted"] else 1
    for p in model.parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = fw.collectives.ring.all_reduce(comm, grad * weight) / votes(comm)
