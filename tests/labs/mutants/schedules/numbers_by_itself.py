"""aimed at: execute: the order of the list. Numbers the micro-batches by itself instead of reading the list."""

_right = execute


def execute(actions, stage, comm):
    seen = {"F": 0, "B": 0}

    class Counting:
        def forward(self, k, x):
            seen["F"] += 1
            return stage.forward(seen["F"] - 1, x)

        def backward(self, k, dy):
            seen["B"] += 1
            return stage.backward(seen["B"] - 1, dy)

    _right(actions, Counting(), comm)
