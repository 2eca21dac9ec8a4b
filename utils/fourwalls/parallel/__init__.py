"""Strategies that train one model on many ranks. Each is compared with one device, step by step.

They never import each other: they meet in `train`.

    parameters after k steps on n ranks  =  parameters after k steps on one device, within rounding

Reference: DESIGN, "The layout".
"""
