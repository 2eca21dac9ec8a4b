"""aimed at: fill: memory. W stands at the end, where nobody needs the memory any more."""

_right = fill


def fill(p, m, limit):
    return [[a for a in row if "W" not in a] + [a for a in row if "W" in a] for row in _right(p, m, limit)]
