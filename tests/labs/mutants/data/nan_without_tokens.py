"""aimed at: token_loss: no tokens. 0 / 0 where nobody has a token."""


def token_loss(loss_sum, tokens, comm, all_reduce):
    return loss_sum * votes(comm) / all_reduce(comm, torch.tensor([tokens]))[0]
