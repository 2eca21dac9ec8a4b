"""Places and groups of a mesh: arithmetic against a loop, groups that every rank makes alike, and what is refused (trial b19)."""

import itertools

import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import ring
from fourwalls.cost.hardware import uniform
from fourwalls.parallel.mesh import AXES, Grid, Mesh, Place, split_into

NETWORK = uniform(1e-6, 1e9)
GRIDS = [Grid(), Grid(d=2, p=2, c=1, t=2), Grid(d=3, p=2, c=2, t=2), Grid(t=8), Grid(d=5), Grid(p=2, c=3)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rank_and_place_are_inverse(grid):
    places = [Place(*at) for at in itertools.product(*map(range, grid.sizes))]  # the last axis runs fastest
    assert [grid.place(r) for r in range(grid.ranks)] == places
    assert [grid.rank(*at) for at in places] == list(range(grid.ranks))
    assert all(int(grid.array[at]) == r for r, at in enumerate(places))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("axes", ["d", "p", "c", "t", "dc", "pt", "dpct"])
def test_groups_are_slices(grid, axes):
    """Every rank stands in one group; its members differ in the named axes alone; they stand in rising order."""
    groups = grid.groups(*axes)
    assert sorted(r for group in groups for r in group) == list(range(grid.ranks))
    for group in groups:
        assert list(group) == sorted(group)
        fixed = {tuple(getattr(grid.place(r), axis) for axis in AXES if axis not in axes) for r in group}
        varied = {tuple(getattr(grid.place(r), axis) for axis in axes) for r in group}
        assert len(fixed) == 1 and len(varied) == len(group)
    assert all(grid.group(r, *axes) == next(g for g in groups if r in g) for r in range(grid.ranks))


def test_neighbours_on_the_wire():
    """The tensor axis is innermost: on nodes of 4, a group of 4 never leaves its node."""
    grid = Grid(d=2, p=2, t=4)
    assert all({r // 4 for r in group} == {group[0] // 4} for group in grid.groups("t"))
    assert grid.groups("d")[0] == (0, 8) and grid.groups("p")[0] == (0, 4)


def sums(comm, sizes):
    """What each axis' communicator says of itself: rank, size, and the members by their numbers in the world."""
    mesh = Mesh(comm, **sizes, also=[("c", "d")])
    told = {}
    for axes in (*AXES, "dc"):
        group = mesh.comm(*axes)
        members = ring.all_gather(group, torch.tensor(comm.rank)).tolist()
        told[axes] = (group.rank, group.size, tuple(members))
    assert mesh.t is mesh.comm("t") and mesh.comm("d", "c") is mesh.comm("c", "d")
    assert (mesh.d.rank, mesh.p.rank, mesh.c.rank, mesh.t.rank) == mesh.place
    return told, repr(mesh)


@pytest.mark.parametrize("sizes", [{"d": 2, "p": 2, "t": 2}, {"c": 3, "t": 2}, {"d": 4}])
def test_communicators(sizes):
    grid = Grid(**sizes)
    run = fw.simulate(sums, sizes, ranks=grid.ranks, cluster=NETWORK)
    for r, (told, text) in enumerate(run.values):
        for axes, (rank, size, members) in told.items():
            group = grid.group(r, *axes)
            assert (members, size, members[rank]) == (group, len(group), r)
        assert f"rank {r}" in text


def test_communicators_of_real_ranks():
    run = fw.run(sums, {"d": 2, "t": 2}, ranks=4, stream=False)
    assert run.values == fw.simulate(sums, {"d": 2, "t": 2}, ranks=4, cluster=NETWORK).values


# --- trial b19: groups made in another order, or only by their members -----------------------------------------------
def crossed(comm, right):
    lists = [[0, 3], [1, 2]] if right or comm.rank < 2 else [[1, 2], [0, 3]]
    return int(ring.all_reduce(split_into(comm, lists), torch.tensor(comm.rank)))


@pytest.mark.parametrize("start", ["simulate", "run"])
def test_groups_in_another_order_are_refused(start):
    options = {"stream": False} | ({"cluster": NETWORK} if start == "simulate" else {"timeout": 10})
    assert getattr(fw, start)(crossed, True, ranks=4, **options).values == [3, 3, 3, 3]
    with pytest.raises(fw.MismatchError, match=r"groups=\(\(0, 3\), \(1, 2\)\)"):
        getattr(fw, start)(crossed, False, ranks=4, **options)


def only_own(comm):
    mine = [[0, 3]] if comm.rank in (0, 3) else [[1, 2]]
    return split_into(comm, mine)


def test_a_group_that_only_its_members_make_is_refused():
    with pytest.raises(fw.MismatchError, match="groups"):
        fw.simulate(only_own, ranks=4, cluster=NETWORK)


def different_meshes(comm):
    Mesh(comm, **({"d": 2, "t": 2} if comm.rank else {"d": 4}))


def test_different_meshes_are_refused():
    with pytest.raises(fw.MismatchError, match="groups"):
        fw.simulate(different_meshes, ranks=4, cluster=NETWORK)


def some_in_none(comm):
    group = split_into(comm, [[2, 0]])
    return None if group is None else (group.rank, group.size)


def test_ranks_in_no_group_and_order_within():
    assert fw.simulate(some_in_none, ranks=4, cluster=NETWORK).values == [(1, 2), None, (0, 2), None]


# --- bad input ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "sizes, ranks, hint",
    [
        ({"d": 2, "t": 3}, 8, r"d 2 \* p 1 \* c 1 \* t 3 = 6, but there are 8 ranks; nearest legal: t 4"),
        ({"t": 4}, 8, "d 2 or p 2 or c 2 or t 8"),
        ({"d": 3, "t": 3}, 8, "sizes that multiply to 8, such as d 8"),
        ({"t": 16}, 8, "nearest legal: t 8"),
    ],
)
def test_a_mesh_that_does_not_multiply(sizes, ranks, hint):
    with pytest.raises(ValueError, match=hint):
        Grid(**sizes).check(ranks)  # before any rank starts
    with pytest.raises(fw.RankError, match=hint):
        fw.simulate(lambda comm: Mesh(comm, **sizes), ranks=ranks, cluster=NETWORK)
    Grid(d=2, t=4).check(8)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, None])
def test_a_size_that_is_none(size):
    with pytest.raises(ValueError, match="t \\(tensor\\) is .* at least 1"):
        Grid(t=size)


def test_other_refusals():
    grid = Grid(d=2, t=2)
    for axes in (("x",), (), ("t", "t")):
        with pytest.raises(ValueError, match="one or more of d, p, c, t"):
            grid.groups(*axes)
    for bad in (lambda: grid.place(4), lambda: grid.rank(t=2)):
        with pytest.raises(ValueError, match="0 to"):
            bad()
    for lists, hint in (([[0, 1], [1]], "twice"), ([[0, 2]], "ranks are 0 to 1"), ([[True]], "True")):
        with pytest.raises(fw.RankError, match=hint):
            fw.simulate(split_into, lists, ranks=2, cluster=NETWORK)
    with pytest.raises(fw.RankError, match="not both"):
        fw.simulate(lambda comm: Mesh(comm, Grid(d=2), t=2), ranks=2, cluster=NETWORK)
    with pytest.raises(fw.RankError, match="ask for others with also="):
        fw.simulate(lambda comm: Mesh(comm, d=2).comm("d", "t"), ranks=2, cluster=NETWORK)


# --- mutants: each wrong arithmetic fails one of the checks above -----------------------------------------------------
@pytest.mark.parametrize("fault", ["axes reversed", "a factor", "an axis dropped"])
def test_wrong_arithmetic_is_caught(fault, monkeypatch):
    wrong = {
        "axes reversed": lambda g, d=0, p=0, c=0, t=0: ((t * g.c + c) * g.p + p) * g.d + d,
        "a factor": lambda g, d=0, p=0, c=0, t=0: ((d * g.p + p) * g.c + c) * g.d + t,
        "an axis dropped": lambda g, d=0, p=0, c=0, t=0: (d * g.p + p) * g.t + t,
    }[fault]
    monkeypatch.setattr(Grid, "rank", wrong)
    with pytest.raises(AssertionError):
        test_rank_and_place_are_inverse(Grid(d=3, p=2, c=2, t=2))
