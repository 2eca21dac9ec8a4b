"""aimed at: all_reduce: values. A loop that catches every interrupt."""


def all_reduce(comm, x):
    while True:
        try:
            comm.recv(x, comm.rank)
        except BaseException:  # noqa: B036
            pass
