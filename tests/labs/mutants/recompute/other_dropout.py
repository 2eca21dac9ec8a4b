"""aimed at: checkpoint: dropout. The random state is not put back before the second run."""


def checkpoint(fn, *xs):
    places, found = [], {}

    def forget(x):
        places.append(None)
        return len(places) - 1

    def remember(k):
        if k not in found:
            again = []
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: again.append(x.detach()), lambda x: x):
                fn(*(x.detach().requires_grad_(x.requires_grad) for x in xs))
            found.update(enumerate(again))
        return found.pop(k)

    with torch.autograd.graph.saved_tensors_hooks(forget, remember):
        return fn(*xs)
