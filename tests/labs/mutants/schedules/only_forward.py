"""aimed at: gpipe: legal. A pipeline that never goes back."""

_right = gpipe


def gpipe(p, m):
    return [row[:m] for row in _right(p, m)]
