"""The cells that a target needs, on notebooks small enough to see."""

from .needed import needed_cells


def test_a_target_needs_the_last_binder_of_each_name_it_reads():
    sources = ["x = 1", "x = 2", "y = 3", "print(x)"]
    assert needed_cells(sources, [3]) == [1, 3]


def test_needs_are_followed_through_functions_and_imports():
    sources = ["import math", "unused = 5", "def f(unused):\n    return math.pi * unused * g()", "def g():\n    return 2", "f(1)"]
    assert needed_cells(sources, [4]) == [0, 2, 3, 4]


def test_a_name_that_the_cell_binds_first_is_not_needed_from_above():
    sources = ["run = slow()", "for i in range(3):\n    run = i\nprint(run, i)", "total = 0", "total += 1", "print(total)"]
    assert needed_cells(sources, [1]) == [1]
    assert needed_cells(sources, [4]) == [2, 3, 4]


def test_what_changes_an_object_between_is_needed():
    sources = ["items = []", "items.append(1)", "box = {}", "box['a'] = items", "print(box)", "items.clear()"]
    assert needed_cells(sources, [4]) == [0, 1, 2, 3, 4]


def test_magics_and_prose_are_passed_over():
    assert needed_cells(["", "%matplotlib inline\nx = 1", "!ls\nprint(x)"], [2]) == [1, 2]
