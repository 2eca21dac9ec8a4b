"""aimed at: master_step: 16 bytes. The gradients stay in 32 bits, too, until the next step."""

_right = master_step


def master_step(w16, g16, state):
    _right(w16, g16, state)
    state["g"] = [g.float() for g in g16]
