"""aimed at: Scaler: gradients that are used. Each rank clips by the norm of its own gradients."""

import fourwalls.collectives.ring as _ring


class Scaler(Scaler):
    _right = Scaler.step

    def step(self, opt, comm):
        global all_reduce
        asked = []

        def all_reduce(comm, x, op="sum"):
            asked.append(x)
            return _ring.all_reduce(comm, x, op=op) if len(asked) == 1 else x

        return self._right(opt, comm)
