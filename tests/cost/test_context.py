"""Who gets which tokens, and what it costs: cuts, tiles and work against brute force over the mask, bytes by hand; refusals."""

import pytest

from fourwalls.cost.context import (
    CUTS,
    check_cut,
    check_heads_shared,
    context_bytes,
    largest_share,
    multiple,
    runs,
    scores,
    tiles,
    work,
)
from fourwalls.cost.flops import layer_ops
from fourwalls.cost.shape import Shape


def held(cut, s, c, r):
    return [p for run in runs(cut, s, c, r) for p in run]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("c", [1, 2, 3, 4, 8])
def test_every_position_has_one_owner(cut, c):
    for s in (multiple(cut, c), 5 * multiple(cut, c)):
        own = [held(cut, s, c, r) for r in range(c)]
        assert sorted(p for row in own for p in row) == list(range(s))
        assert all(row == sorted(row) and len(row) == s // c for row in own)


def test_cuts_by_hand():
    assert [held("equal", 8, 2, r) for r in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [held("zigzag", 8, 2, r) for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [held("striped", 8, 2, r) for r in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert held("zigzag", 5, 1, 0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("c, s", [(1, 7), (2, 12), (3, 12), (4, 24), (8, 32)])
def test_work_is_what_the_mask_leaves(cut, c, s):
    """With tiles of one row not a score too many or too few; all ranks together do the triangle of one device."""
    for causal in (True, False):
        found = work(cut, s, c, causal=causal)
        for r in range(c):
            for q in range(c):
                wanted = sum(key <= query or not causal for query in held(cut, s, c, r) for key in held(cut, s, c, q))
                assert found[r][q] == wanted
        shape = Shape(1, 8, 2, s, 16)
        assert 2 * sum(map(sum, found)) * 8 == layer_ops(shape, 1, causal=causal)[1].forward


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 100])
def test_tiles_cover_exactly_what_may_be_seen(cut, rows):
    c, s = 4, 24
    for r in range(c):
        queries = held(cut, s, c, r)
        for q in range(c):
            keys, seen = held(cut, s, c, q), set()
            for tile in tiles(runs(cut, s, c, r), runs(cut, s, c, q), rows=rows):
                for i in range(tile.first, tile.last):
                    for j in range(tile.columns):
                        assert (i, j) not in seen
                        seen.add((i, j))
                        if j < tile.open:
                            assert keys[j] <= queries[i]  # open: needs no mask
                assert keys[tile.columns - 1] <= queries[tile.last - 1]  # the last column is seen by somebody
            assert {(i, j) for i in range(s // c) for j in range(s // c) if keys[j] <= queries[i]} <= seen


def test_a_block_that_is_wholly_masked_has_no_tiles():
    assert tiles(runs("equal", 16, 4, 1), runs("equal", 16, 4, 2)) == []
    assert work("equal", 16, 4)[1][2] == 0
    assert len(tiles(runs("zigzag", 16, 4, 1), runs("zigzag", 16, 4, 0))) == 1  # two chunks of queries, one product


@pytest.mark.parametrize("c", [2, 3, 4, 8])
def test_balance(c):
    """Equal slices: the last rank does 2c - 1 times the first's, nearly; zigzag: all the same, exactly; striped: nearly."""
    s = 240 * 2 * c
    each = [sum(row) for row in work("equal", s, c)]
    own = s // c
    assert each[-1] / each[0] == ((c - 1) * own * own + own * (own + 1) // 2) / (own * (own + 1) // 2)
    assert 2 * c - 1 - 0.02 * c < each[-1] / each[0] < 2 * c - 1
    for rows in (1, 16, 128):
        assert largest_share("zigzag", s, c, rows=rows) == 1
    assert 1 < largest_share("striped", s, c) < 1.01
    assert largest_share("equal", s, c) == pytest.approx((2 * c - 1) / c, rel=0.01)
    assert largest_share("equal", s, c, causal=False) == 1


def test_four_ranks_seven_times():
    each = [sum(row) for row in work("equal", 4096, 4)]
    assert 6.99 < each[3] / each[0] < 7 and largest_share("equal", 4096, 4) < 1.75


def test_a_score_more_is_seen():
    """The brute force above tells a triangle from one with a wrong diagonal, and a tile too large."""
    right = work("striped", 12, 3)
    assert right[0][1] != right[1][0]  # strictly below the diagonal, and with it
    assert scores(tiles((range(4),), (range(4),), rows=4)) == 16 and scores(tiles((range(4),), (range(4),), rows=1)) == 10


@pytest.mark.parametrize(
    "call, hint",
    [
        (lambda: check_cut("equal", 10, 4), "a sequence of 10 cannot be shared by c 4; nearest legal length: 8 or 12 .*fill_up"),
        (lambda: check_cut("zigzag", 12, 4), r"by c 4 in two chunks each \(zigzag\); nearest legal length: 8 or 16"),
        (lambda: check_cut("zigzag", 4, 4), "nearest legal length: 8 "),  # one token a rank: zigzag needs two
        (lambda: check_cut("striped", 1, 2), "nearest legal length: 2 "),
        (lambda: check_cut("equal", 0, 2), "sequence of 0 cannot"),
        (lambda: check_cut("round", 8, 2), "cut is 'round'; allowed: equal, zigzag, striped"),
        (lambda: check_cut("equal", 8, 0), "c is 0; it is a whole number of at least 1"),
        (lambda: check_cut("equal", 8, True), "c is True"),
        (lambda: check_heads_shared(12, 12, 8), "12 heads cannot be traded among c 8; legal c: 1, 2, 3, 4, 6, 12 .*'ring'"),
        (lambda: check_heads_shared(32, 4, 8), "32 heads with 4 key and value heads cannot .* legal c: 1, 2, 4 "),
        (lambda: tiles((range(4),), (range(4),), rows=0), "rows is 0"),
        (lambda: context_bytes("star", 2, batch=1, length=8, heads=2, head_width=4), "allowed: ring, gather, ulysses"),
        (lambda: context_bytes("ring", 3, batch=1, length=8, heads=2, head_width=4), "length 8; c is"),
    ],
)
def test_refusals(call, hint):
    with pytest.raises(ValueError, match=hint):
        call()


def test_bytes_by_hand():
    sizes = {"batch": 2, "length": 16, "heads": 8, "head_width": 4}
    block = 2 * 2 * 8 * 4 * 4 * 4  # K and V, b, kv, s/c, d, 4 bytes
    assert context_bytes("ring", 4, **sizes) == (3 * block, 7 * block)
    assert context_bytes("gather", 4, **sizes) == (3 * block, 3 * block)
    assert context_bytes("ulysses", 4, **sizes) == (3 * 2 * block // 4,) * 2
    assert all(context_bytes(form, 1, **sizes) == (0, 0) for form in ("ring", "gather", "ulysses"))
    # trial i05: with 2 key heads of 8, a quarter of the bytes go round; in 16 bits gradients still travel in 32
    assert context_bytes("ring", 4, **sizes, kv_heads=2) == (3 * block // 4, 7 * block // 4)
    assert context_bytes("ring", 4, **sizes, itemsize=2) == (3 * block // 2, 3 * block // 2 + 4 * block)
    assert context_bytes("ulysses", 2, **sizes, kv_heads=2) == ((2 * 8 + 2 * 2) * 2 * 8 * 4 * 4 // 2,) * 2
