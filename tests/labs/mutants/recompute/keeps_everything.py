"""aimed at: checkpoint: saved bytes. Nothing is forgotten."""


def checkpoint(fn, *xs):
    return fn(*xs)
