"""aimed at: smooth: values. 1 / s: makes the outliers worse."""

_right = smooth


def smooth(xmax, w, a):
    return 1 / _right(xmax, w, a)
