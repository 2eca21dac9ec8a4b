"""aimed at: average_grads: tied. A rank without a gradient does not call: the others sum something else, or wait."""


def average_grads(model, comm, all_reduce):
    for p in model.parameters():
        if p.grad is not None:
            p.grad = all_reduce(comm, p.grad) / votes(comm)
