"""The benchmark of compression: bytes are counted and must be the formula's, and each scheme stands beside float32."""

from types import SimpleNamespace

import pytest

from fourwalls import bench
from fourwalls.bench import compress
from fourwalls.parallel.compress import SCHEMES


def options(**change):
    return SimpleNamespace(ranks=[2], sizes=[4096], pairs=6, algorithms=None, **change)


def test_every_scheme_beside_float32():
    rows = list(bench.load("compress").rows(options()))
    found = {(row.case["scheme"], row.metric): row for row in rows}
    assert {scheme for scheme, _ in found} == set(SCHEMES) and all(row.ok for row in rows)
    assert found["bfloat16", "bytes_ratio"].value == 0.5 and found["int8", "bytes_ratio"].value == pytest.approx(0.25, abs=0.01)
    for scheme in SCHEMES:
        time = found[scheme, "time"]
        assert time.pairs == 6 and time.time_ratio_low <= time.time_ratio <= time.time_ratio_high and "float32" in time.peer
        even = found[scheme, "break_even"]
        saved = 4096 - found[scheme, "bytes_sent"].value  # two ranks: a float32 ring sends S
        assert even.source == "modelled" and even.value == pytest.approx(saved / found[scheme, "computing"].value / 1e9)
    assert found["bfloat16", "error"].value < found["int8", "error"].value < found["low-rank", "error"].value < 1


def test_a_scheme_whose_formula_is_off_is_not_ok():
    run = SimpleNamespace(values=[{"ours": [1.0], "theirs": [1.0], "computing": 1.0}] * 2, backend="gloo")
    counted = SimpleNamespace(
        values=[{"span": (0, 9), "formula": 11, "error": 0.0, "same": True}] * 2,
        trace=[SimpleNamespace(kind="send", rank=r, start=1, end=2, bytes=10) for r in range(2)],
    )
    assert not any(row.ok for row in compress._rows_of("bfloat16", 2, 3, counted, run))


def test_a_name_that_is_none():
    wrong = options()
    wrong.algorithms = ["zip"]
    with pytest.raises(ValueError, match="no scheme 'zip'; there are bfloat16, int8"):
        next(compress.rows(wrong))
