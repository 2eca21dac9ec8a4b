"""aimed at: plan: nothing fits. Gives a plan where there is none."""

_right = plan


def plan(nbytes, flops, budget):
    try:
        return _right(nbytes, flops, budget)
    except ValueError:
        return [True] * len(nbytes)
