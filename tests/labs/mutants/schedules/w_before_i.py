"""aimed at: fill: legal. The weights' gradient before the input's."""

_right = fill


def fill(p, m, limit):
    return [[a.replace("W", "x").replace("I", "W").replace("x", "I") for a in row] for row in _right(p, m, limit)]
