"""aimed at: smooth: dead channels. A channel without weights becomes infinite."""


def smooth(xmax, w, a):
    wmax = w.abs().amax(0 if lab.reference["layout"] == "out, in" else 1)
    return xmax**a / wmax ** (1 - a)
