"""aimed at: token_loss: no tokens. float32 cannot count beyond 2 to the 24."""


def token_loss(loss_sum, tokens, comm, all_reduce):
    total = all_reduce(comm, torch.tensor([float(tokens)]))
    return loss_sum * (votes(comm) / max(float(total), 1))
