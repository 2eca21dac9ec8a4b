"""The theatre plays the library's algorithms and the reader's own, and says so in words where nobody can press a button."""

import pytest

from fourwalls.collectives import ring
from fourwalls.course.theatre import algorithms, theatre


def my_ring(comm, x):
    return ring.all_reduce(comm, x)


def test_the_readers_own_function_comes_first():
    assert list(algorithms(my_ring)) == ["my_ring", "ring", "tree", "star", "broken ring"]


def test_words(project, capsys):
    assert theatre(my_ring, ranks=3) is None
    out = capsys.readouterr().out
    assert "my_ring, 3 ranks" in out and out.rstrip().endswith("All ranks hold the sum.")
    theatre(algorithm="broken ring")
    assert "holds 2·r1+r2" in capsys.readouterr().out


def test_a_function_that_fails_shows_its_message(project, capsys):
    def fails(comm, x):
        raise KeyError("my own mistake")

    theatre(fails)
    assert "my own mistake" in capsys.readouterr().out


def test_bad_arguments(project):
    with pytest.raises(ValueError, match="one of ring"):
        theatre(algorithm="butterfly")
    with pytest.raises(ValueError, match="functions"):
        theatre(3)
