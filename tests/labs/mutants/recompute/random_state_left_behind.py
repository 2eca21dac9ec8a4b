"""aimed at: checkpoint: dropout. The state is put back before the second run, and left where that run ends."""


def checkpoint(fn, *xs):
    state, places, found = torch.get_rng_state(), [], {}

    def forget(x):
        places.append(None)
        return len(places) - 1

    def remember(k):
        if k not in found:
            again = []
            torch.set_rng_state(state)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: again.append(x.detach()), lambda x: x):
                fn(*(x.detach().requires_grad_(x.requires_grad) for x in xs))
            found.update(enumerate(again))
        return found.pop(k)

    with torch.autograd.graph.saved_tensors_hooks(forget, remember):
        return fn(*xs)
