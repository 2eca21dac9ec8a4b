"""aimed at: token_loss: one device. Divides by all tokens, forgets that average_grads divides as well."""


def token_loss(loss_sum, tokens, comm, all_reduce):
    return loss_sum / max(int(all_reduce(comm, torch.tensor([tokens]))), 1)
