"""Arithmetic about time, bytes and FLOPs: no tensor is made here, and torch is never imported.

Every formula stands in one function with its source, and is compared elsewhere with what was measured or simulated.

    prediction = formula(sizes)        belief = prediction beside measurement

Reference: the papers named in each module, and the tables under data/published.
"""
