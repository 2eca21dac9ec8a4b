"""One rank does what the others do not: steps, forgets gradients, clips, loads, evaluates. It is named before the two are mixed,
and what one rank may do alone is not refused.
"""

import pytest
import torch
from torch import nn

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.nn.mlp import MLP
from fourwalls.nn.optim import AdamW
from fourwalls.parallel.data import DataParallel
from fourwalls.parallel.replicas import checksum
from fourwalls.parallel.zero import zero
from fourwalls.ranks.meter import Meter

NETWORK = uniform(1e-6, 1e9)
DOUBLE = torch.float64
ODD, WHEN, STEPS = 1, 1, 3  # rank 1 is the odd one, in step 1 of 3


def simulate(program, *args, ranks=2, **options):
    return fw.simulate(program, *args, ranks=ranks, cluster=NETWORK, **options)


def build():
    """Three units of equal size: what is mixed up fits."""
    return nn.Sequential(*(MLP((4, 4), seed=k, dtype=DOUBLE) for k in range(3)))


def rows(step, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=DOUBLE)


class Replicas:
    """Data parallelism with an optimiser, to be called as ZeRO is."""

    stage = 0

    def __init__(self, model, comm):
        self.dp, self.model = DataParallel(model, comm, bucket_bytes=100), model
        self.optimizer = AdamW(model.parameters(), lr=1e-2)
        self.param_groups = self.optimizer.param_groups

    def step(self):
        self.dp.synchronise()
        self.optimizer.step()

    def zero_grad(self):
        self.model.zero_grad()

    def clip_(self, largest):
        self.dp.clip_(largest)

    def full_parameters(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def wrap(model, comm, stage):
    return zero(model, comm, stage=stage, lr=1e-2) if stage else Replicas(model, comm)


# --- what is named ---------------------------------------------------------------------------------------------------------
def double(model):
    model.load_state_dict({name: 2 * x for name, x in model.state_dict().items()})


def program(comm, stage, fault):
    """Three steps of two micro-batches each (ZeRO) or one; the odd rank has its fault in one of them."""
    model = build()
    wrapper = wrap(model, comm, stage)
    for step in range(STEPS):
        fails = fault if comm.rank == ODD and step == WHEN else ""
        if fault == "loads alone" and stage == 3 and step == WHEN:
            with wrapper.gathered():
                if fails:
                    double(model)
        elif fails == "loads alone":
            double(model)
        if fails == "forward alone":
            model(rows(9, 0))
        if fails == "freezes alone":
            model[0].layers[0].weight.requires_grad_(False)
        if fails == "rate of its own":
            wrapper.param_groups[0]["lr"] = 0.5
        for micro in range(2 if stage else 1):
            loss = model(rows(step, comm.rank)).square().mean() / 2
            if fails == "backward twice":
                loss.backward(retain_graph=True)
            loss.backward()
            if fails == "forgets half" and micro == 0:
                wrapper.zero_grad()
        if fails == "clips alone":
            wrapper.clip_(0.01)
        if fails == "steps twice":
            wrapper.step()
            wrapper.step() if stage else wrapper.optimizer.step()
        elif fails != "skips a step":
            wrapper.step()
        elif stage == 0:
            wrapper.dp.synchronise()
        if fails != "keeps its gradients":
            wrapper.zero_grad()
    return wrapper.full_parameters()


SUMS, GATHERS = "ZeRO's sum of gradients", "ZeRO's gather of parameters"
MIXED = f"rank . says collective=({GATHERS}|{SUMS}), rank . says collective=ZeRO's"
CLEARS = "Zero1.step differently: rank 0 says calls of zero_grad=1, rank 1 says calls of zero_grad="
WEIGHTS = "differently: rank 0 says checksum of the weights=.*, rank 1 says"
WHOLE = r"the end of gathered\(\) differently: rank 0 says checksum of the parameters=.*, rank 1 says"
LR = "Zero{}.step differently: rank 0 says lr=0.01, rank 1 says lr=0.5"
FROZEN = "Zero{}.step differently: rank 0 says trained=6, rank 1 says trained=5"
CLIPS = "collective=Zero{}.step, rank 1 says collective=all_reduce"
AHEAD = GATHERS + " differently: rank 0 says steps taken=2, rank 1 says steps taken="
FEWER = SUMS + " differently: rank 0 says sums since zero_grad=1, rank 1 says sums since zero_grad=0"
MORE = SUMS + " differently: rank 0 says sums since zero_grad=0, rank 1 says sums since zero_grad=2"
UNIT = GATHERS + " differently: rank 0 says of=2.layers.0.weight, rank 1 says of=0.layers.0.weight"
FAULTS = {  # fault: what is said of stage 0 (data parallelism), 1, 2, 3; None: nothing is wrong with it
    "skips a step": (WEIGHTS, CLEARS + "2", MIXED, AHEAD + "1"),
    "steps twice": (WEIGHTS, CLEARS + "0", MIXED, AHEAD + "3"),
    "forgets half": ("rank 1, step 1: .* without a backward", CLEARS + "2", FEWER, FEWER),
    "keeps its gradients": ("gradients not cleared=0, rank 1 says gradients not cleared=6", CLEARS + "0", MORE, MORE),
    "clips alone": (r"rank 1, step 1: clip_\(\) before synchronise", CLIPS, CLIPS, CLIPS),
    "loads alone": (WEIGHTS, WEIGHTS, WEIGHTS, WHOLE),
    "rate of its own": (WEIGHTS, LR, LR, LR),
    "freezes alone": ("0.layers.0.weight was trained when DataParallel was made and is frozen now", FROZEN, FROZEN, FROZEN),
    "forward alone": (None, None, None, UNIT),
    "backward twice": ("arrives a second time", None, MIXED, GATHERS),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_does_it_alone_is_named(fault, stage):
    says = FAULTS[fault][stage]
    if says is None:
        first, second = simulate(program, stage, fault).values
        assert all(torch.equal(p, second[name]) for name, p in first.items())
        return
    with pytest.raises((fw.MismatchError, fw.RankError), match=says.format(stage)):
        simulate(program, stage, fault)


def test_on_real_ranks_too():
    with pytest.raises(fw.MismatchError, match=AHEAD + "1"):
        fw.run(program, 3, "skips a step", ranks=2, stream=False)


def other_options(comm, **options):
    DataParallel(build(), comm, **{name: values[comm.rank] for name, values in options.items()})


@pytest.mark.parametrize(
    "options",
    [{"average": ("ranks", "none")}, {"mode": ("naive", "bucketed")}, {"bucket_bytes": (1, 99)}, {"buffers": ("first", "local")}],
)
def test_options_that_differ_are_named(options):
    ((word, (first, second)),) = options.items()
    with pytest.raises(
        fw.MismatchError, match=f"DataParallel differently: rank 0 says {word}={first}, rank 1 says {word}={second}"
    ):
        simulate(other_options, **options)


# --- what is not -----------------------------------------------------------------------------------------------------------
def allowed(comm, stage, what):
    """What changes no number: parameters after three steps, and the bytes sent in them."""
    model = build()
    wrapper = wrap(model, comm, stage)
    begin = comm.clock()
    for step in range(STEPS):
        odd = comm.rank == ODD and step == WHEN and what
        if odd == "swaps its weights and back":
            kept = model.state_dict()
            kept = {name: x.clone() for name, x in kept.items()}
            double(model)
            model(rows(9, 0))
            model.load_state_dict(kept)
        if odd == "zeros its gradients in place":
            model.zero_grad(set_to_none=False)
        if odd == "forgets twice":
            wrapper.zero_grad()
        model(rows(step, comm.rank)).square().mean().backward()
        wrapper.step()
        if what != "zeros its gradients in place" or comm.rank != ODD:
            wrapper.zero_grad()
    end = comm.clock()
    return wrapper.full_parameters(), begin, end


@pytest.mark.parametrize(
    "stage, what",
    [
        (0, "swaps its weights and back"),
        (1, "swaps its weights and back"),
        (2, "swaps its weights and back"),
        (2, "forgets twice"),
        (3, "forgets twice"),
    ],
)
def test_what_changes_no_number_is_not_refused(stage, what):
    right = simulate(allowed, stage, "").values
    for (params, *_), (expected, *_) in zip(simulate(allowed, stage, what).values, right, strict=True):
        assert all(torch.equal(p, expected[name]) for name, p in params.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_asking_costs_no_byte_and_no_time(stage):
    """Statements are in no Trace: with checks and without, the same messages at the same moments."""
    sent = []
    for checks in (False, True):
        run = simulate(allowed, stage, "", ranks=3, checks=checks)
        (begin, end), *_ = {value[1:] for value in run.values}
        sent.append(
            (
                end - begin,
                [(e.rank, e.bytes, e.start - begin) for e in run.trace.where(kind="send").events if begin <= e.start < end],
            )
        )
    assert sent[0] == sent[1] and sent[0][1]


# --- the checksum ----------------------------------------------------------------------------------------------------------
def test_a_checksum_sees_every_bit_and_is_not_seen():
    row = torch.arange(37.0).sin()
    odd = (
        torch.tensor([True, False]),
        torch.tensor(2.0),
        row.half()[1:],
        row.bfloat16()[1:4],
        torch.ones(2, dtype=torch.complex128),
    )
    tensors = [row, row[1:12], row[5:6], row[3:3], row[:12].view(3, 4).t(), row.double()[1:], *odd]
    with Meter() as meter:
        right = checksum(tensors)
    assert right == checksum(tensors) and meter.ops == 0
    for k, x in enumerate(tensors):
        copy = x.clone(memory_format=torch.contiguous_format)
        data = copy.reshape(-1).view(torch.uint8)
        for place in range(len(data)):
            for bit in (1, 128):  # the last is a sign, or so
                data[place] ^= bit
                assert checksum([*tensors[:k], copy, *tensors[k + 1 :]]) != right
                data[place] ^= bit
    assert row.untyped_storage().resizable()  # stage 3 must still be able to free it
