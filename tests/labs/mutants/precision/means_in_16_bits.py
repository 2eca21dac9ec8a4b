"""aimed at: master_step: small steps add up. Adam's means are rounded to 16 bits after each step."""

_right = master_step


def master_step(w16, g16, state):
    _right(w16, g16, state)
    for name in ("m", "v"):
        state[name] = [x.to(w16[0].dtype).float() for x in state[name]]
