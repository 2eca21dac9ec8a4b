"""aimed at: average_grads: tied. A frozen parameter gets a gradient, and the next optimizer step moves it."""


def average_grads(model, comm, all_reduce):
    for p in model.parameters():
        p.grad = all_reduce(comm, torch.zeros_like(p) if p.grad is None else p.grad) / votes(comm)
