"""The same arithmetic with fewer trips to memory: operators that are done in one pass, and products with fewer multiplications.

An operator that does little with each number is as slow as the memory it reads and writes. Several of them in one pass read once
and write once; what lies between stays in a cache, or is never built at all.

    time >= max(bytes / bandwidth, FLOPs / peak)

Reference: Williams, Waterman and Patterson 2009 (roofline); Dao et al. 2022 (arXiv:2205.14135).
"""
