"""aimed at: Scaler: gradients that are used. The norm of the scaled gradients is compared with max_norm."""


class Scaler(Scaler):
    _right = Scaler.step

    def step(self, opt, comm):
        self.max_norm, kept = self.max_norm / self.scale, self.max_norm
        try:
            return self._right(opt, comm)
        finally:
            self.max_norm = kept
