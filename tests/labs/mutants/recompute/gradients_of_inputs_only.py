"""aimed at: checkpoint: values. Weights that fn uses, and that are not among xs, get no gradient."""


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, *xs):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*xs)
        return fn(*xs)

    @staticmethod
    def backward(ctx, grad):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        xs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.fn(*xs)
        torch.set_rng_state(now)
        wanted = [x for x in xs if x.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grad))
        return None, *(next(found) if x.requires_grad else None for x in xs)


def checkpoint(fn, *xs):
    return Again.apply(fn, *xs)
