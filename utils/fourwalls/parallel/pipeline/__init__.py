"""Pipelines: schedules as lists of actions, checked, simulated, drawn and run from that one list.

`actions` is the language, `schedules`, `interleaved`, `zero_bubble`, `v_shape` and `fill` write in it, `legality` reads it for
errors, `simulate` for time and memory, `execute` runs it; `partition` cuts a model into stages.

    schedule[rank] = [0F0, 0F1, 0B0, ...]

Reference: the papers named in each module.
"""
