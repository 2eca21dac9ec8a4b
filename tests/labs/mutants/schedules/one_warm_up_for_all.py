"""aimed at: one_f_one_b: cost. One forward pass at the start of every stage: legal, and slow."""


def one_f_one_b(p, m):
    stages = range(p)[::-1] if lab.reference["reverse"] else range(p)
    return [[f"{s}{kind}{k}" for k in range(m) for kind in "FB"] for s in stages]
