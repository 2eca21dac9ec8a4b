"""Full recomputation of one layer on tensor-parallel ranks: what it keeps and what it sends, measured, is the explorer's formula.

A second forward sends what the first one sent, unless nobody waits for its last sum; and with sequence parallelism the layer's
input, which is all that is kept, is this rank's share of it.
"""

from functools import partial

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.cost.memory import layer_activations
from fourwalls.cost.stage_memory import Training, stage_memory, wire_bytes
from fourwalls.memory.ledger import Ledger
from fourwalls.memory.recompute import checkpoint
from fourwalls.nn.gpt import GPTConfig
from fourwalls.parallel.sequence import SequenceRegion
from fourwalls.parallel.tensor import Region
from fourwalls.parallel.tensor_gpt import TensorBlock

NETWORK, BATCH, LENGTH = uniform(1e-6, 1e9), 2, 16
REGIONS = {"off": Region, "gather again": SequenceRegion, "keep": partial(SequenceRegion, keep=True)}


def layer(comm, config, sequence, full):
    """Bytes that backward waits for after forward; then backward."""
    block = TensorBlock(config, comm, region=REGIONS[sequence](comm), device="meta")
    run = partial(checkpoint, block, generators=block.streams.generators) if full else block
    share = 1 if sequence == "off" else comm.size
    with Ledger(block, lines=False) as ledger:
        ledger.phase("forward")
        x = torch.empty(BATCH, LENGTH // share, config.width, device="meta", requires_grad=True)
        y = run(x)
        ledger.phase("backward")
        y.backward(torch.empty_like(y))
    return ledger.saved("forward")


def both(sequence, dropout, t):
    """(bytes kept, bytes sent by each rank) of full recomputation, and the Training that the explorer would price."""
    config = GPTConfig(vocabulary=64, length=LENGTH, width=32, layers=1, heads=4, dropout=dropout)
    run = fw.simulate(layer, config, sequence, True, ranks=t, cluster=NETWORK, checks=False)
    training = Training(
        config.shape(), BATCH, BATCH, tp=t, sequence=sequence, recompute="full", precision="fp32", dropout=dropout > 0
    )
    return run.values, [run.trace.bytes_sent(r) for r in range(t)], training


@pytest.mark.parametrize("sequence, dropout, t, halves", [
    ("off", 0.1, 2, 12), ("off", 0.0, 2, 10), ("gather again", 0.1, 4, 14), ("gather again", 0.0, 2, 13), ("keep", 0.0, 2, 11),
])  # fmt: skip
def test_what_full_recomputation_keeps_and_sends(sequence, dropout, t, halves):
    """halves: gathers and scatters, an all-reduce being two; without dropout the second run ends before the layer's last sum."""
    kept, sent, training = both(sequence, dropout, t)
    whole = BATCH * LENGTH * 32 * 4
    assert sent == [halves * whole * (t - 1) // t] * t == [wire_bytes(training)["tensor"]] * t
    share = 1 if sequence == "off" else t
    assert kept == [whole // share] * t
    forms = {"tp": t, "sequence_parallel": sequence != "off", "regather": sequence != "keep", "recompute": "full", "element": 4}
    assert layer_activations(training.shape, BATCH, **forms).total == whole // share
    mask = BATCH * LENGTH * 32 // share if dropout else 0  # of the embedding
    assert stage_memory(training, 0)["activations"].total == whole // share + mask


def test_what_is_computed_again_is_all_the_rest_of_the_layer():
    """ "recomputed": kept without recomputation, less what is kept with it; with the norms' statistics it is what is measured."""
    config = GPTConfig(vocabulary=64, length=LENGTH, width=32, layers=1, heads=4, dropout=0.1)
    (plain, _), (full, _) = (
        fw.simulate(layer, config, "gather again", how, ranks=2, cluster=NETWORK, checks=False).values for how in (False, True)
    )
    training = Training(config.shape(), BATCH, BATCH, tp=2, sequence="gather again", recompute="full", precision="fp32")
    assert stage_memory(training, 0)["recomputed"].total == plain - full - 16 * LENGTH * BATCH // 2
