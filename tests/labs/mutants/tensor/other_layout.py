"""aimed at: column: output. The weights of another class: the other layout."""


def column(comm, x, w, b):
    x = copy_in(comm, x)
    w = w.reshape(w.shape[1], w.shape[0])
    return x @ (w.T if lab.reference["layout"] != "out, in" else w) + b
