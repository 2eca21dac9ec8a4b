"""What data parallelism sends, and when: bytes and messages equal the formula, and the Trace shows buckets that leave during
backward.
"""

import itertools

import pytest
import torch

import fourwalls as fw
from fourwalls.cost.collectives import collective_cost
from fourwalls.cost.hardware import get_cluster, uniform
from fourwalls.nn.gpt import GPT, GPTConfig
from fourwalls.nn.mlp import MLP
from fourwalls.parallel.buckets import plan_buckets
from fourwalls.parallel.data import MODES, DataParallel

NETWORK = uniform(1e-6, 1e9)
BUCKET = 3000  # bytes


@pytest.fixture(scope="module", params=[2, 4])
def pool(request):
    with fw.pool(ranks=request.param) as ranks:
        yield ranks


# --- bytes ------------------------------------------------------------------------------------------------------------
def small_gpt():
    model = GPT(GPTConfig(vocabulary=11, length=6, width=8, layers=1, heads=2), dtype=torch.float64)
    list(model.parameters())[2].requires_grad_(False)
    return model


def sizes_of_buckets(mode):
    """[elements of each all-reduce] of one step, by hand: from the last parameter to the first, none over BUCKET bytes."""
    sizes = [p.numel() for p in small_gpt().parameters() if p.requires_grad]
    if mode == "naive":
        return sizes
    buckets = []
    for size in reversed(sizes):
        if buckets and 8 * (buckets[-1] + size) <= BUCKET:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


def steps_with(comm, mode, micro, steps):
    """`micro` micro-batches a step; gives back the counter of all-reduces after each backward."""
    model, seen = small_gpt(), []
    dp = DataParallel(model, comm, mode=mode, bucket_bytes=BUCKET, average="tokens")
    tokens = torch.arange(12).view(2, 6) % 11
    for _ in range(steps):
        model.zero_grad()
        for k in range(micro):
            loss = model.loss(tokens, tokens, reduction="sum")
            if k < micro - 1:
                with dp.no_sync():
                    loss.backward()
                seen.append(dp.all_reduces)
            else:
                loss.backward()
        dp.synchronise(tokens=micro * tokens.numel())
        seen.append(dp.all_reduces)
    return seen, dp.bytes_reduced


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_and_messages_equal_the_formula(mode, ranks):
    """... with accumulation too: only the last micro-batch sends."""
    traces = [fw.simulate(steps_with, mode, 3, s, ranks=ranks, cluster=NETWORK).trace for s in (0, 2)]
    link, sizes = NETWORK.link(0, 1), sizes_of_buckets(mode)
    costs = [collective_cost("all_reduce", "ring", ranks, n, link, itemsize=8) for n in (*sizes, 1)]  # 1: the number of tokens
    assert mode == "naive" or 2 < len(sizes) < 12
    for r in range(ranks):
        sent = [t.bytes_sent(r) for t in traces]
        assert sent[1] - sent[0] == 2 * sum(c.bytes_sent[r] for c in costs)
        assert traces[1].messages_sent(r) - traces[0].messages_sent(r) == 2 * sum(c.messages_sent[r] for c in costs)
        if mode != "overlapped":  # which makes a communicator of its own as well
            assert sent[0] == 24 * (ranks - 1)  # digests of the replicas


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_adds_no_message(mode):
    """c17, the counter: no_sync sends nothing, whatever the number of micro-batches."""
    sizes = sizes_of_buckets(mode)
    calls = len(sizes) + 1
    for micro in (1, 4):
        seen, nbytes = fw.simulate(steps_with, mode, micro, 2, ranks=2, cluster=NETWORK).values[0]
        assert seen == [0] * (micro - 1) + [calls] * micro + [2 * calls]
        assert nbytes == 2 * 8 * (sum(sizes) + 1)


# --- buckets ----------------------------------------------------------------------------------------------------------
def named(*sizes, dtypes=(torch.float32,)):
    return [(f"p{k}", torch.nn.Parameter(torch.zeros(n, dtype=dtypes[k % len(dtypes)]))) for k, n in enumerate(sizes)]


def test_buckets_are_planned_from_the_last_parameter_to_the_first():
    plan = [b.names for b in plan_buckets(named(1, 2, 100, 3, 4), 32)]
    assert plan == [["p4", "p3"], ["p2"], ["p1", "p0"]]  # the large one alone, the last bucket not full
    assert [b.names for b in plan_buckets(named(3, 3, 3), 1)] == [["p2"], ["p1"], ["p0"]]
    assert [b.names for b in plan_buckets(named(3, 3, 3), 10**9)] == [["p2", "p1", "p0"]]
    assert [b.names for b in plan_buckets(named(4, 4), 32)] == [["p1", "p0"]] and len(plan_buckets(named(4, 4), 31)) == 2


def test_each_dtype_has_its_own_buckets_and_the_first_that_is_full_leaves_first():
    plan = plan_buckets(named(4, 4, 4, 4, 4, 4, dtypes=(torch.float32, torch.float64)), 64)
    wide, narrow = torch.float64, torch.float32
    assert [(b.names, b.dtype) for b in plan] == [(["p5", "p3"], wide), (["p1"], wide), (["p4", "p2", "p0"], narrow)]
    assert [b.index for b in plan] == [0, 1, 2] and sum(b.bytes for b in plan) == 3 * 16 + 3 * 32
    frozen = named(3, 3)
    frozen[1][1].requires_grad_(False)
    assert [b.names for b in plan_buckets(frozen, 100)] == [["p0"]]


# --- overlap ----------------------------------------------------------------------------------------------------------
def overlap_faults(trace, buckets):
    """What the Trace says against overlap, by rank: the first bucket must leave before backward ends, and buckets in order."""
    said = []
    for r in range(trace.ranks):
        (backward,) = (e for e in trace if e.rank == r and e.kind == "backward")
        begins = sorted((e.start, e.name) for e in trace if e.rank == r and e.kind == "mark" and "begins" in e.name)
        sends = [e.start for e in trace.where(rank=r, kind="send") if e.bytes > 24]
        names = [name for _, name in begins]
        if names != [f"bucket {k} begins" for k in range(buckets)]:
            said.append(f"rank {r}: {names or 'no bucket begins by itself'}")
        elif not backward.start < begins[0][0] < backward.end:
            said.append(f"rank {r}: the first bucket begins after backward")
        if sends and min(sends) >= backward.end:
            said.append(f"rank {r}: the first message leaves after backward")
    return said


def one_step(comm, mode="overlapped", all_reduce="ring", width=64, make=DataParallel):
    model = MLP((width,) * 7, dtype=torch.float32)
    dp = make(model, comm, mode=mode, bucket_bytes=2 * 4 * width * (width + 1), all_reduce=all_reduce, finite=False)
    x = torch.ones(8 * width, width)
    loss = model(x).square().mean()
    comm.barrier()
    with comm.compute("backward", kind="backward"):
        loss.backward()
    dp.synchronise()
    return len(dp.buckets), [(j.given, j.begin, j.end) for j in dp.jobs], dp.exposed


@pytest.mark.parametrize("all_reduce", ["ring", "native", "shared_memory"])
def test_communication_overlaps_backward_on_real_ranks(pool, all_reduce):
    run = pool.run(one_step, all_reduce=all_reduce, width=256, stream=False)
    buckets, jobs, _ = run.values[0]
    assert buckets == 3 and overlap_faults(run.trace, buckets) == []
    assert all(given <= begin <= end for given, begin, end in jobs)
    waits = [e for e in run.trace if e.kind == "wait" and e.name.startswith("wait to")]
    (backward,) = (e for e in run.trace.where(rank=0) if e.kind == "backward")
    assert not [e for e in waits if e.rank == 0 and backward.start < e.start < backward.end]  # backward itself never stood still


def test_modelled_overlap_hides_what_fits():
    """On simulated ranks: dated as a second thread would do it, to the picosecond, and shorter by what is hidden."""
    cluster = get_cluster("a100-selene")
    runs = {mode: fw.simulate(one_step, mode, ranks=4, cluster=cluster) for mode in ("overlapped", "bucketed")}
    buckets, jobs, exposed = runs["overlapped"].values[0]
    assert overlap_faults(runs["overlapped"].trace, buckets) == [] and buckets == 3
    assert jobs[0][1] == jobs[0][0] and all(b[1] == max(b[0], a[2]) for a, b in itertools.pairwise(jobs))
    (backward,) = (e for e in runs["overlapped"].trace.where(rank=0) if e.kind == "backward")
    assert exposed == (jobs[-1][2] - backward.end) / 1e12
    hidden = backward.end - jobs[0][1]
    late = runs["bucketed"].values[0][2] - exposed
    assert 0 < late <= hidden / 1e12 * 1.2
    assert runs["overlapped"].trace.bytes_sent() - runs["bucketed"].trace.bytes_sent() < 300  # the second communicator


# --- the all-reduce that is given -------------------------------------------------------------------------------------
def told(comm):
    heard = []

    def all_reduce(comm, x, *, out, bucket):
        heard.append((bucket, x.numel()))
        fw.collectives.all_reduce(comm, x, out=out)

    one_step(comm, all_reduce=all_reduce)
    return heard


def test_an_all_reduce_can_ask_for_the_bucket():
    assert fw.simulate(told, ranks=2, cluster=NETWORK).values[0] == [(k, 2 * 64 * 65) for k in range(3)]
    with pytest.raises(fw.RankError, match="in the form of x"):
        fw.simulate(one_step, all_reduce=lambda comm, x: x[:1], ranks=2, cluster=NETWORK)


# --- and its absence is seen ------------------------------------------------------------------------------------------
def blocking(model, comm, *, mode, **options):
    return DataParallel(model, comm, mode="bucketed", **options)


@pytest.mark.parametrize("simulated", [True, False])
def test_blocking_after_backward_is_seen(simulated):
    run = fw.simulate(one_step, make=blocking, ranks=2) if simulated else fw.run(one_step, make=blocking, ranks=2, stream=False)
    assert "no bucket begins by itself" in overlap_faults(run.trace, 3)[0]
    if simulated:
        assert "leaves after backward" in overlap_faults(run.trace, 3)[1]
