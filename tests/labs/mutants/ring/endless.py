"""aimed at: all_reduce: values. A loop without end."""


def all_reduce(comm, x):
    while True:
        pass
