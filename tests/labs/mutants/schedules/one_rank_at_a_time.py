"""aimed at: execute: cost. A barrier in front of every action."""

_right = execute


def execute(actions, stage, comm):
    class Slow:
        def forward(self, k, x):
            y = stage.forward(k, x)
            with comm.compute("asleep", seconds=0.5):
                pass
            return y

        def backward(self, k, dy):
            return stage.backward(k, dy)

    _right(actions, Slow(), comm)
