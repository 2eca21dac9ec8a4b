"""aimed at: step1: parameters. Nobody divides."""


def votes(comm):
    return 1
