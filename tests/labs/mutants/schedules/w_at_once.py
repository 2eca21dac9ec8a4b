"""aimed at: fill: slots. W right behind its I: nothing is filled."""

_right = fill


def fill(p, m, limit):
    rows = []
    for row in _right(p, m, limit):
        rows.append([b for a in row if "W" not in a for b in ((a, a.replace("I", "W")) if "I" in a else (a,))])
    return rows
