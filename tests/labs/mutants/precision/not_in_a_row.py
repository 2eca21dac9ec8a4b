"""aimed at: Scaler: the scale over time. A skipped step does not begin the count anew."""


class Scaler(Scaler):
    _right = Scaler.step

    def step(self, opt, comm):
        good = self.good
        stepped = self._right(opt, comm)
        if not stepped:
            self.good = good
        return stepped
