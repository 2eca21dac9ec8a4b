"""aimed at: checkpoint: frozen inputs. A Function that autograd passes over where no input needs a gradient."""


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, *xs):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*xs)
        with torch.no_grad():
            return fn(*xs)

    @staticmethod
    def backward(ctx, grad):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        xs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.fn(*xs)
        torch.set_rng_state(now)
        y.backward(grad)
        return None, *(x.grad for x in xs)


def checkpoint(fn, *xs):
    return Again.apply(fn, *xs)
