"""aimed at: row: gradients. The sum is right, and the bias learns t times too slowly."""


def row(comm, x, w, b):
    return sum_out(comm, x @ (w.T if lab.reference["layout"] == "out, in" else w) + b / comm.size)
