"""Fewer bits for every number: what a format can hold, how to round into it, and how to train in it all the same.

A format is a set of ticks on the number line; rounding picks a tick, a scale places them. What 16 bits lose is kept in a master
copy of 32; what 8 bits lose depends on who shares a scale with whom.

    x ~ round(x / scale) * scale

Reference: Micikevicius et al. 2018 (arXiv:1710.03740).
"""
