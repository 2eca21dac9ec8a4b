"""aimed at: vocab_loss: loss. The reduction of another class."""

_right = vocab_loss


def vocab_loss(comm, logits, y, first):
    loss = _right(comm, logits, y, first)
    return loss * len(y) if lab.reference["reduction"] == "mean" else loss / len(y)
