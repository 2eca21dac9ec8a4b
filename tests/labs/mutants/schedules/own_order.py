"""aimed at: execute: the order of the list. Sorts the list: all forward passes first."""

_right = execute


def execute(actions, stage, comm):
    _right(sorted(actions, key=lambda a: ("B" in a, actions.index(a))), stage, comm)
