"""aimed at: master_step: no float32 product. The copies take the place of the weights."""

_right = master_step


def master_step(w16, g16, state):
    if not state:
        state |= {"t": 0, "w": [w.float() for w in w16]}
        state |= {name: [torch.zeros_like(w) for w in state["w"]] for name in ("m", "v")}
        w16[:] = state["w"]
    _right([w.to(g.dtype) for w, g in zip(w16, g16, strict=True)], g16, state)
