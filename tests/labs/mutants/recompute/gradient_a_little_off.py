"""aimed at: checkpoint: values. The gradient that arrives is off by ten times what rounding allows."""

_right = checkpoint


def checkpoint(fn, *xs):
    y = _right(fn, *xs)
    y.register_hook(lambda g: g * (1 + 1e-9))
    return y
