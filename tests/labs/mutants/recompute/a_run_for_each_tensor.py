"""aimed at: checkpoint: forwards. What the second run finds is thrown away but for the one tensor that was asked for."""


def checkpoint(fn, *xs):
    state, places = torch.get_rng_state(), []

    def forget(x):
        places.append(None)
        return len(places) - 1

    def remember(k):
        now, again = torch.get_rng_state(), []
        torch.set_rng_state(state)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: again.append(x.detach()), lambda x: x):
            fn(*(x.detach().requires_grad_(x.requires_grad) for x in xs))
        torch.set_rng_state(now)
        return again[k]

    with torch.autograd.graph.saved_tensors_hooks(forget, remember):
        return fn(*xs)
