"""aimed at: gpipe: legal. The first stage lies on the other end."""

_right = gpipe


def gpipe(p, m):
    return _right(p, m)[::-1]
