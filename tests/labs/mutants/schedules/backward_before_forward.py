"""aimed at: gpipe: legal. All backward passes stand in front."""

_right = gpipe


def gpipe(p, m):
    return [row[m:] + row[:m] for row in _right(p, m)]
