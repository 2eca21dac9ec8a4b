"""aimed at: Scaler: everybody steps. What overflowed is set to zero, and the step is made."""


class Scaler(Scaler):
    _right = Scaler.step

    def step(self, opt, comm):
        for p in opt.params:
            if p.grad is not None:
                p.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return self._right(opt, comm)
