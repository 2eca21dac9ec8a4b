"""What runs on the learner's side of a check: it calls what the learner wrote, and gives back plain data. It knows no answer.

    driver(comm, {name: function}, *inputs) -> plain data

Reference: course/judge.py, which names these functions.
"""

__all__ = ["call", "pure", "unchanged"]


def call(comm, functions, *inputs):
    """The last of `functions`, as a rank program: function(comm, *inputs)."""
    return list(functions.values())[-1](comm, *inputs)


def pure(comm, functions, *inputs):
    """The last of `functions`, which needs no ranks: function(*inputs)."""
    return list(functions.values())[-1](*inputs)


def unchanged(comm, functions, *inputs):
    """Whether the last of `functions` leaves its tensors as they were."""
    before = [x.clone() if hasattr(x, "clone") else x for x in inputs]
    call(comm, functions, *inputs)
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(inputs, before, strict=True))
