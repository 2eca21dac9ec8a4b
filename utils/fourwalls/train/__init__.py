"""Training: where the strategies of `parallel` meet in one step.

    one device's step  =  the step of a (d, p, t) mesh, within rounding

Reference: DESIGN, "The layout".
"""
