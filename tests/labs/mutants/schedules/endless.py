"""aimed at: fill: legal. A search without end."""


def fill(p, m, limit):
    while True:
        pass
