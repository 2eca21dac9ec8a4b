"""aimed at: token_loss: one device. The mean of each rank's mean: right if all have equally many tokens."""


def token_loss(loss_sum, tokens, comm, all_reduce):
    all_reduce(comm, torch.tensor([tokens]))
    return loss_sum / max(tokens, 1)
