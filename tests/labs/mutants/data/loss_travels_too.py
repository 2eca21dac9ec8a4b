"""aimed at: token_loss: cost. Sums the losses as well, which nobody needs."""


def token_loss(loss_sum, tokens, comm, all_reduce):
    both = all_reduce(comm, torch.stack([loss_sum.detach(), torch.tensor(float(tokens), dtype=torch.float64)]))
    return loss_sum * (votes(comm) / max(float(both[1]), 1))
