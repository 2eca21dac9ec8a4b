"""aimed at: master_step: small steps add up. Adam's means are kept, the copy of the weights is not."""

_right = master_step


def master_step(w16, g16, state):
    _right(w16, g16, state)
    state["w"] = [w.float() for w in w16]
