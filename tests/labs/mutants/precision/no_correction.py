"""aimed at: master_step: one step. The means are not corrected for their start at zero."""

_right = master_step


def master_step(w16, g16, state):
    if state:
        state["t"] = 10**6
    else:
        state |= {"t": 10**6, "w": [w.float() for w in w16]}
        state |= {name: [torch.zeros_like(w) for w in state["w"]] for name in ("m", "v")}
    _right(w16, g16, state)
