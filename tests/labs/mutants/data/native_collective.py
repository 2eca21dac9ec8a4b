"""aimed at: average_grads: gradients. torch's own."""


def average_grads(model, comm, all_reduce):
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad /= votes(comm)
