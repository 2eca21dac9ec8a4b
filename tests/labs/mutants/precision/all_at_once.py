"""aimed at: master_step: 16 bytes. All gradients are brought to 32 bits before the first weight is stepped."""

_right = master_step


def master_step(w16, g16, state):
    _right(w16, [g.float() for g in g16], state)
