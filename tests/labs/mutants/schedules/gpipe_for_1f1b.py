"""aimed at: one_f_one_b: cost. As fast, and holds m."""


def one_f_one_b(p, m):
    stages = range(p)[::-1] if lab.reference["reverse"] else range(p)
    return [[f"{s}F{k}" for k in range(m)] + [f"{s}B{k}" for k in range(m)] for s in stages]
