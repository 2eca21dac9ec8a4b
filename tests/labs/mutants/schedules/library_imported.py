"""aimed at: fill: legal. The library's own."""


def fill(p, m, limit):
    from fourwalls.parallel.pipeline.fill import fill as own

    return [[str(a) for a in row] for row in own(p, m, limit)]
