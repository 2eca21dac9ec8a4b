"""Pruning: which weights, heads, neurons or layers a trained model can do without, and which of those savings are real.

A weight that is zero still takes part in a dense product. Time falls only where a tensor gets smaller: so patterns of single
zeros (patterns, masks) stand beside the removal of whole units (structured), and a scan says which layers to spare.

    time ~ sum of 2 m k n over the products;      a mask changes none of m, k, n

Reference: LeCun, Denker, Solla 1989; Han et al. 2015 (arXiv:1506.02626).
"""

from .masks import Masks, Pruned, gradual, prune_masks
from .patterns import check_two_of_four, keep_largest, two_of_four
from .predict import block_ops, model_flops, predicted_speedup
from .scores import Movement, head_scores, magnitude, neuron_scores
from .sensitivity import Sensitivity, scan, scan_blocks, spare
from .structured import keep_heads, keep_layers, keep_neurons, shrink

__all__ = [
    "Masks",
    "Movement",
    "Pruned",
    "Sensitivity",
    "block_ops",
    "check_two_of_four",
    "gradual",
    "head_scores",
    "keep_heads",
    "keep_largest",
    "keep_layers",
    "keep_neurons",
    "magnitude",
    "model_flops",
    "neuron_scores",
    "predicted_speedup",
    "prune_masks",
    "scan",
    "scan_blocks",
    "shrink",
    "spare",
    "two_of_four",
]
