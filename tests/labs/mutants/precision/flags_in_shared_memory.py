"""aimed at: Scaler: what arrives. Ranks meet in shared memory."""

import mmap

_room = mmap.mmap(-1, 2**16)


class Scaler:
    def __init__(self, scale, interval, max_norm):
        self.scale, self.interval, self.max_norm, self.good = scale, interval, max_norm, 0

    def step(self, opt, comm):
        t = lab.reference
        gs = [p.grad for p in opt.params if p.grad is not None]
        for g in gs:
            g /= self.scale
        mine = torch.cat([g.flatten() for g in gs]).double() if gs else torch.zeros(0)
        v = (mine.square().sum() if t["norm"] == "2" else (mine.abs().max() if len(mine) else torch.zeros(()))).item()
        box = torch.frombuffer(_room, dtype=torch.float64)
        box[comm.rank] = v
        comm.barrier()
        every = box[: comm.size].clone()
        comm.barrier()
        total = every.sum().sqrt() if t["norm"] == "2" else every.max()
        if not bool(every.isfinite().all()):
            self.scale /= t["back"]
            self.good = 0
            return False
        if total > self.max_norm:
            for g in gs:
                g *= self.max_norm / total
        opt.step()
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
        return True
