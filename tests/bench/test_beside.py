"""Each collective beside torch's own on tiny sizes: the rows, wrong results counted, the best of ours, and torchrun."""

from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from types import SimpleNamespace

import pytest

import fourwalls as fw
from fourwalls import bench
from fourwalls.bench import beside
from fourwalls.bench.__main__ import main
from fourwalls.collectives import ALGORITHMS
from fourwalls.cost.collectives import bus_factor

COLLECTIVES = {
    "all-gather": ("all_gather_", 3 * 42),
    "reduce-scatter": ("reduce_scatter_", 3 * 42),
    "broadcast": ("broadcast", 128),
    "all-to-all": ("all_to_all_single", 3 * 42),
}
NAMES = ["all_reduce", *(name.replace("-", "_") for name in COLLECTIVES)]


def options(**given):
    return SimpleNamespace(**({"ranks": [3], "sizes": [512], "pairs": 2, "algorithms": None} | given))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_algorithm_stands_beside_torchs(name):
    peer, numel = COLLECTIVES[name]
    collective, rows = name.replace("-", "_"), list(bench.load(name).rows(options()))
    algorithms = list(ALGORITHMS[collective])
    measured = [row for row in rows if row.metric != "best_of_ours"]
    assert [(r.case["algorithm"], r.metric) for r in measured] == [
        (algorithm, metric) for algorithm in algorithms for metric in ("time", "algbw", "busbw", "wrong")
    ]
    assert all(row.ok and row.benchmark == name and row.machine == {"backend": "gloo"} for row in rows)
    assert all(
        (r.case["ranks"], r.case["bytes"], r.case["checks"], r.case["dtype"]) == (3, 4 * numel, False, "float32")
        for r in measured
    )
    for time, algbw, busbw, wrong in zip(*(measured[k::4] for k in range(4)), strict=True):
        assert time.peer.startswith(f"torch.distributed.{peer}") and time.pairs == 2 and time.unit == "s"
        assert algbw.value == pytest.approx(4 * numel / time.value / 1e9)
        assert busbw.value == pytest.approx(algbw.value * bus_factor(collective, 3))
        assert wrong.value == 0
    assert len(rows) - len(measured) == (len(algorithms) > 1)


def plant(comm, names):
    """{name: wrong elements here (right algorithm, torch's, one that spoils rank 1's last element, one that does nothing)}."""
    found = {}
    for name in names:
        module = import_module(f"fourwalls.bench.{name}")
        right = module.get_algorithm(name, None)

        def spoils(comm, x, right=right, **options):
            result = right(comm, x, **options)
            if comm.rank == 1:
                result.view(-1)[-1] += 1
            return result

        def idle(comm, x, **options):
            return x.view(-1)[: x.numel() // comm.size]

        wrong = []
        for function in (right, spoils, idle):
            module.get_algorithm = lambda *_, function=function: function
            work = module.job(comm, "planted", 120)
            wrong += [work.wrong_ours(), work.wrong_theirs()]
        assert wrong[1] == wrong[3] == wrong[5]
        found[name] = (wrong[0], wrong[1], wrong[2], wrong[4])
    return found


def test_a_wrong_result_is_counted():
    """The benchmarks must not be blind: neither to one element on one rank nor to an algorithm that leaves all as it was."""
    first, second = fw.run(plant, NAMES, ranks=2).values
    share = {"all_reduce": 120, "all_gather": 120, "reduce_scatter": 60, "broadcast": 120, "all_to_all": 120}
    for name in NAMES:
        assert first[name][:3] == (0, 0, 0) and second[name][:3] == (0, 0, 1), name
        idle = 0 if name == "broadcast" else share[name]  # the root has it already
        assert first[name][3] >= 0.95 * idle and second[name][3] >= 0.95 * share[name], name


def test_all_reduce_shows_the_copy_limit_and_the_best_of_ours():
    rows = list(bench.load("all-reduce").rows(options(ranks=[2], algorithms=["ring", "shared_memory"], pairs=3)))
    (share,) = [row for row in rows if row.metric == "share_of_copy_limit"]
    assert share.case["algorithm"] == "shared_memory" and share.ok and share.pairs == 3
    assert share.value == pytest.approx(1 / share.time_ratio) and share.peer.startswith("copying 2(n-1)/n")
    (best,) = [row for row in rows if row.metric == "best_of_ours"]
    times = {row.case["algorithm"]: row for row in rows if row.metric == "time" and not row.case["checks"]}
    chosen = times.pop(best.case["fastest"])
    assert asdict(best) == asdict(chosen) | {"metric": "best_of_ours", "case": best.case}
    assert best.time_ratio <= min(row.time_ratio for row in times.values())


@pytest.mark.parametrize(("ours", "believed"), [(0.6, True), (0.4, False)])
def test_i22_a_reduction_faster_than_copying_could_be_is_not_believed(ours, believed):
    """Somebody who reads the clock before the result is there would be twice as fast as the memory."""
    module = bench.load("all-reduce")
    values = [{"ours": [ours] * 7, "theirs": [1.0] * 7, "shared": True, "wrong": 0}] * 2
    ranks = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(values=values, backend="gloo"))
    case = {"algorithm": "shared_memory", "bytes": 4096}
    with nullcontext() if believed else pytest.warns(RuntimeWarning, match="wait for the result"):
        (row,) = module._copy_limit(ranks, case, pairs=7)
    assert row.ok is believed


def test_the_slowest_rank_counts_in_each_pair():
    run = SimpleNamespace(values=[{"ours": [1, 5], "theirs": [2, 2]}, {"ours": [3, 4], "theirs": [1, 6]}])
    assert beside.pair_times(run) == ([3, 5], [2, 6])


@pytest.mark.parametrize(("nbytes", "ranks", "numel"), [(4096, 4, 1024), (4096, 3, 1023), (4, 3, 3), (0, 2, 2)])
def test_sizes_are_shared_equally(nbytes, ranks, numel):
    assert beside.whole_pieces(nbytes, ranks) == numel


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-reduce", "--ranks", "2"], "--ranks 2: torchrun has started 4; leave --ranks out"),
        (["launch"], "launch starts its ranks itself, on one machine: run it without torchrun"),
    ],
)
def test_under_torchrun_the_ranks_are_given(arguments, words, monkeypatch, capsys):
    given = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and words in capsys.readouterr().err
