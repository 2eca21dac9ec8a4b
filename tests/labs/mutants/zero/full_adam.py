"""aimed at: step1: state. Everybody steps everything: right values, and Adam's state n times."""


def step1(params, grads, state, comm, reduce_scatter, all_gather):
    flat = torch.cat([g.reshape(-1) for g in grads])
    grad = all_gather(comm, reduce_scatter(comm, flat) / votes(comm), flat.numel())
    if not state:
        state.update(m=torch.zeros_like(grad), v=torch.zeros_like(grad), step=0)
    state["step"] += 1
    whole = torch.cat([p.reshape(-1) for p in params])
    adam_(whole, grad, state["m"], state["v"], state["step"], lr=0.01, eps=1e-3)
    for p, part in zip(params, whole.split([p.numel() for p in params]), strict=True):
        p.copy_(part.view_as(p))
