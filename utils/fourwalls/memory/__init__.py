"""Where the bytes of a training step are: counted one storage at a time, while the step runs.

    live bytes = sum over storages that something still refers to        a view costs nothing

Reference: Korthikanti et al. 2022 (arXiv:2205.05198) for what a layer keeps.
"""
