"""aimed at: gpipe: the order asked for. The other order on the way back."""

_right = gpipe


def gpipe(p, m):
    return [row[:m] + row[m:][::-1] for row in _right(p, m)]
