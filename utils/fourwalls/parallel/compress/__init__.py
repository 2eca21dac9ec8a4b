"""Fewer bytes on the wire: all-reduces that round, pick or factor the gradient first, and remember what they left out.

Each scheme is an object that stands where an all-reduce stands, `total = scheme(comm, x)`, and carries its messages over whatever
all-reduce it is given, the reader's own ring included. What it leaves out of one step is added to the next (feedback.py).

    of float32's bytes:  bfloat16 1/2,  int8 1/4,  top-k n k (4 + w) / (2 N w),  low rank r (rows + columns) / (rows columns)

Reference: Xu et al. 2021, "GRACE: a compressed communication framework", for a comparison of many schemes.
"""

from .feedback import Compressor
from .low_rank import LowRank
from .sums import Bfloat16, Int8
from .top_k import TopK

__all__ = ["SCHEMES", "Bfloat16", "Compressor", "Int8", "LowRank", "TopK"]

# name on a command line -> how one is made
SCHEMES = {
    "bfloat16": Bfloat16,
    "int8": Int8,
    "int8-wide": lambda **options: Int8(wide=True, **options),
    "top-k": lambda **options: TopK(**{"ratio": 0.01} | options),
    "low-rank": LowRank,
}
