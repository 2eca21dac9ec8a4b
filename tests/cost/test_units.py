"""Sizes with units: decimal and binary never mixed, terms that sum to their total, tables that are read as they are."""

from fractions import Fraction

import pytest

from fourwalls.cost.published import folder, number, published
from fourwalls.cost.terms import Term, Terms, exact
from fourwalls.cost.units import both, format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    "text, size",
    [
        ("16MiB", 2**24),
        ("4KiB", 4096),
        ("4 kib", 4096),
        ("1GB", 10**9),
        ("1kB", 1000),
        ("1.5KiB", 1536),
        ("0.3kB", 300),
        ("512", 512),
        (7, 7),
        ("2TiB", 2**41),
    ],
)
def test_parse(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text, hint",
    [
        ("16M", "16MiB or 16MB"),
        ("3K", "3KiB or 3kB"),
        ("ten", "write"),
        ("-4KiB", "write"),
        (-4, "at least 0"),
        ("0.5B", "whole"),
        ("", "write"),
        ("4Q", "no unit"),
    ],
)
def test_parse_refuses(text, hint):
    with pytest.raises(ValueError, match=hint):
        parse_bytes(text)


def test_gb_is_not_gib():
    assert both(100 * 10**12 * 16 // 8) == "200.00 TB = 181.90 TiB"  # trial i16
    assert format_bytes(2**30) == "1.00 GiB" and format_bytes(2**30, binary=False) == "1.07 GB"
    assert format_bytes(2**30 - 1) == "1.00 GiB"  # not 1024.00 MiB
    assert format_bytes(12) == "12 B" and format_bytes(0) == "0 B"
    assert format_bytes(32 * 3 * 224 * 224 * 4, binary=False) == "19.27 MB"  # trial i17


def test_round_trip():
    for text in ("3.00 MiB", "1.50 GiB", "12 B"):
        assert format_bytes(parse_bytes(text)) == text


def test_counts_and_times():
    assert format_count(4.511e18, "FLOP") == "4.511 EFLOP" and format_count(999999) == "1 M"
    assert format_seconds(34 * 86400) == "34 days" and format_seconds(1.23e-5) == "12.3 us"


def test_terms_sum_and_refuse():
    terms = Terms([Term("a", "x", 3, 2), Term("b", "y / 4", Fraction(5, 4))])
    assert terms.total == Fraction(29, 4) == terms["a"].bytes + terms["b"].bytes
    assert terms.times(4).total == 29 and type(terms.times(4).total) is int
    assert exact(Fraction(8, 4)) == 2
    with pytest.raises(ValueError, match="same name"):
        Terms([Term("a", "", 1), Term("a", "", 2)])
    with pytest.raises(ValueError, match="different units"):
        Terms([Term("a", "", 1), Term("b", "", 2, unit="FLOP")])
    with pytest.raises(KeyError, match="there are"):
        terms["c"]
    assert "29" not in str(terms["a"]) and "total" in str(terms)


def test_published_tables_are_whole():
    names = sorted(p.stem for p in folder().glob("*.csv"))
    assert "zero_table1" in names
    for name in names:
        table = published(name)
        assert table.title and table.source and table.status and len(table) >= 1, name
    assert published("zero_table1").row(dp="64")["7.5B_os_g_p"] == "1.88"
    assert number("95,000") == 95000.0


def test_published_refuses():
    with pytest.raises(ValueError, match="zero_table1"):
        published("zero_table")
    with pytest.raises(ValueError, match="no column"):
        published("zero_table1").row(ranks=4)
    with pytest.raises(ValueError, match="0 rows"):
        published("zero_table1").row(dp="5")


def test_published_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("FOURWALLS_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="FOURWALLS_DATA"):
        published("zero_table1")
