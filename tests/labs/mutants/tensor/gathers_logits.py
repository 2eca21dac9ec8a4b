"""aimed at: vocab_loss: cost. All logits on every rank, by a sum over padded ones."""


def vocab_loss(comm, logits, y, first):
    mine = torch.nn.functional.one_hot(torch.tensor(comm.rank), comm.size).double() * logits.shape[1]
    sizes = all_reduce(comm, mine).long().tolist()
    pads = (sum(sizes[: comm.rank]), sum(sizes[comm.rank + 1 :]))
    whole = sum_out(comm, torch.nn.functional.pad(logits, pads))
    return torch.nn.functional.cross_entropy(whole, y, reduction=lab.reference["reduction"])
