"""aimed at: Scaler: everybody steps. Each rank looks at its own gradients; nobody asks the others."""


class Scaler(Scaler):
    def step(self, opt, comm):
        grads = [p.grad for p in opt.params if p.grad is not None]
        for g in grads:
            g.div_(self.scale)
        if any(not bool(g.isfinite().all()) for g in grads):
            self.scale, self.good = self.scale / lab.reference["back"], 0
            return False
        opt.step()
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
        return True
