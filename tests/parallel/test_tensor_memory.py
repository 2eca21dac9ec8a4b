"""What one layer keeps for its backward, to the byte, on meta tensors at the papers' sizes; and what it does to time and wire.

Measured = Table 2 of Korthikanti et al. 2022 + 16 s b bytes of norm statistics (two norms, mean and 1/std, float32 on meta; a
CPU's bfloat16 kernels keep them in 16 bits), which the paper leaves out; divided by t where the sequence is cut. With selective
recomputation the random state that a recomputed block must restore comes on top, by its own name.
"""

import functools

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.cost.memory import layer_activations
from fourwalls.cost.published import published
from fourwalls.cost.shape import MODELS
from fourwalls.memory.ledger import Ledger
from fourwalls.memory.recompute import checkpoint
from fourwalls.nn.attention import attend
from fourwalls.nn.gpt import GPTConfig
from fourwalls.parallel.sequence import SequenceRegion
from fourwalls.parallel.tensor import Region
from fourwalls.parallel.tensor_gpt import TensorBlock

NETWORK = uniform(1e-6, 1e9)
BF16 = {"device": "meta", "dtype": torch.bfloat16}
PIECES = {  # one message a chunk: nothing here depends on segments
    name: functools.partial(getattr(ring, name), segment_bytes=None) for name in ("all_reduce", "all_gather", "reduce_scatter")
}
REGIONS = {
    "t": lambda comm: Region(comm, all_reduce=PIECES["all_reduce"]),
    "t + sequence": lambda comm: SequenceRegion(comm, **PIECES),
    "t + sequence, kept": lambda comm: SequenceRegion(comm, keep=True, **PIECES),
}
TABLE_2 = {  # (region, selective recomputation) -> the paper's row; it has none for the kept form
    ("t", False): "tensor parallel (baseline)",
    ("t", True): "tensor parallel + selective",
    ("t + sequence", False): "tensor + sequence parallel",
    ("t + sequence", True): "tensor + sequence + selective",
}


def config_of(shape, dropout=0.1):
    return GPTConfig(
        vocabulary=shape.vocabulary,
        length=shape.length,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        dropout=dropout,
    )


def saved_by_a_layer(comm, config, batch, kind, selective=False):
    """(bytes that backward waits for, the tensors) after the forward of one layer."""
    block = TensorBlock(config, comm, region=REGIONS[kind](comm), **BF16)
    if selective:
        block.attention.core = functools.partial(checkpoint, attend, generators=block.streams.generators)
    s = config.length // (1 if kind == "t" else comm.size)
    with Ledger(block, lines=False) as ledger:
        ledger.phase("forward")
        x = torch.empty(batch, s, config.width, requires_grad=True, **BF16)
        y = block(x)
        ledger.phase("after")
    assert y.shape == x.shape
    return ledger.saved("forward"), [(t.shape, t.dtype, t.bytes) for t in ledger.saved_tensors()]


def paper(name, batch, kind):
    """Table 2's formula, evaluated from the published text itself, for the configurations of Table 3."""
    row = published("korthikanti2022_table3_configs").row(model=name)
    words = {"t": int(row["tp"]), "s": 2048, "b": batch, "h": int(row["hidden"]), "a": int(row["heads"])}
    text = published("korthikanti2022_table2_memory").row(configuration=kind)["bytes_per_layer"]
    return eval(text, {"__builtins__": {}}, words)


SIZES = ("22B", "175B", "530B", "1T")


def formula_of(name, kind, selective, t=8):
    """(layer_activations of one of the papers' models, its micro-batch)."""
    batch = int(published("korthikanti2022_table3_configs").row(model=name)["micro_batch"])
    options = {"sequence_parallel": kind != "t", "regather": "kept" not in kind}
    return layer_activations(MODELS[name], batch, tp=t, recompute="selective" if selective else "none", **options), batch


@pytest.mark.parametrize(("kind", "selective"), TABLE_2)
def test_the_formula_is_table_2(kind, selective):
    for name in SIZES:
        formula, batch = formula_of(name, kind, selective)
        assert paper(name, batch, TABLE_2[kind, selective]) == pytest.approx(formula.total, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "kind", "selective"),
    [(name, kind, (i + j) % 2 == 1) for i, name in enumerate(SIZES) for j, kind in enumerate(REGIONS)],  # every two settings meet
)
def test_saved_bytes_of_the_papers_layers(name, kind, selective):
    """What is kept is the formula, which the test above compares with the paper at every size and setting."""
    shape, t = MODELS[name], 8
    formula, batch = formula_of(name, kind, selective)
    config = config_of(shape)
    runs = fw.simulate(saved_by_a_layer, config, batch, kind, selective, ranks=t, cluster=NETWORK, checks=False).values
    sbh, statistics = shape.length * batch * shape.width, 16 * shape.length * batch // (1 if kind == "t" else t)
    wanted = {
        "t": sbh * (10 + 24 / t),
        "t + sequence": sbh * 34 / t,
        "t + sequence, kept": sbh * (34 / t + 4 * (1 - 1 / t)),
    }[kind] + (0 if selective else 5 * shape.heads * shape.length**2 * batch // t)
    for saved, tensors in runs:  # on meta nobody draws, so no random state is kept for the recomputed core
        assert saved == wanted + statistics
        assert selective or saved == sum(size for *_, size in tensors)
        assert sum(size for _, dtype, size in tensors if dtype == "float32") == statistics
    assert formula.total == wanted


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("kind", list(REGIONS))
def test_saved_bytes_of_grouped_queries_and_a_narrow_mlp(t, kind):
    """The count holds line by line for other shapes: kv_heads 4 of 8 (trial i05), ff 3 h, no dropout."""
    config = GPTConfig(vocabulary=64, length=32, width=64, layers=1, heads=8, kv_heads=4, ff=192, rotary=True)
    formula = layer_activations(
        config.shape(), 2, tp=t, sequence_parallel=kind != "t", regather="kept" not in kind, dropout=False
    )
    for saved, _ in fw.simulate(saved_by_a_layer, config, 2, kind, ranks=t, cluster=NETWORK, checks=False).values:
        assert saved == formula.total + 16 * 32 * 2 // (1 if kind == "t" else t)


def saved_on_the_cpu(comm, config, kind):
    region = REGIONS[kind](comm)
    block = TensorBlock(config, comm, region=region)
    block.attention.core = functools.partial(checkpoint, attend, generators=block.streams.generators)
    with Ledger(block, lines=False) as ledger:
        ledger.phase("forward")
        x = torch.zeros(2, region.own(torch.empty(2, config.length, 1), 1).shape[1], config.width, requires_grad=True)
        y = block(x)
        ledger.phase("after")
    begin = ledger.story().phases[1][0]
    after = ledger.curve()[begin].bytes  # the state is kept, but autograd did not save it
    return after["activations"] + after["temporary"] - y.nbytes


@pytest.mark.parametrize("kind", list(REGIONS))
def test_the_random_state_of_a_recomputed_core(kind):
    """Where numbers are really drawn, one more term: the state of the one stream that the core drew from."""
    config = GPTConfig(vocabulary=64, length=32, width=64, layers=1, heads=8, dropout=0.1)
    options = {"sequence_parallel": kind != "t", "regather": "kept" not in kind, "recompute": "selective", "element": 4}
    formula = layer_activations(config.shape(), 2, tp=2, **options)
    state = torch.Generator().get_state().numel()
    for kept in fw.simulate(saved_on_the_cpu, config, kind, ranks=2, cluster=NETWORK, checks=False).values:
        assert kept == formula.total + 16 * 32 * 2 // (1 if kind == "t" else 2) + state


def layer_in_time(comm, config, batch, kind):
    """One layer forward and backward on the roofline's clock; (bytes kept, bytes of the peak)."""
    block = TensorBlock(config, comm, region=REGIONS[kind](comm), **BF16)
    s = config.length // (1 if kind == "t" else comm.size)
    with Ledger(block, lines=False, on_change=comm.mark_live) as ledger:
        ledger.phase("forward")
        x = torch.empty(batch, s, config.width, requires_grad=True, **BF16)
        with comm.compute("forward", kind="forward"):
            y = block(x)
        ledger.phase("backward")
        with comm.compute("backward", kind="backward"):
            y.backward(torch.empty_like(y))
    return ledger.saved("forward"), ledger.peak


@pytest.mark.parametrize("kind, sent", [("t", 4), ("t + sequence", 5), ("t + sequence, kept", 4)])
def test_a_layer_of_175b_on_8_modelled_a100(kind, sent):
    """Bytes sent: 4 all-reduces of s b h numbers (2 bytes each, 2 (t-1)/t times), or 1.25 times that, or as much."""
    shape = MODELS["175B"]
    run = fw.simulate(layer_in_time, config_of(shape), 1, kind, ranks=8, cluster="a100-selene", clock="roofline", checks=False)
    each = 2 * shape.length * shape.width * 2 * 7 // 8
    assert all(run.trace.bytes_sent(r) == sent * each for r in range(8))
    assert run.trace.sources == ("modelled",) and 0 < run.makespan < 1
    kinds = {e.kind for e in run.trace}
    assert {"forward", "backward", "send", "recv", "live"} <= kinds
    # products alone: 24 b s h^2 + 4 b s^2 h forward, twice as much backward, on 8 devices at 312 TFLOP/s
    products = 3 * (24 * shape.length * shape.width**2 + 4 * shape.length**2 * shape.width) / 8 / 312e12
    assert run.makespan > products
