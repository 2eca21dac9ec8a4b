"""aimed at: execute: gradients equal one device. A send that waits: two neighbours send at once, and nobody receives."""


def execute(actions, stage, comm):
    p = comm.size
    index = p - 1 - comm.rank if lab.reference["reverse"] else comm.rank
    rank_of = (lambda s: p - 1 - s) if lab.reference["reverse"] else (lambda s: s)
    for action in actions:
        kind, k = ("F", int(action.split("F")[1])) if "F" in action else ("B", int(action.split("B")[1]))
        frm, to = (index - 1, index + 1) if kind == "F" else (index + 1, index - 1)
        x = comm.recv(torch.empty(3, 5, dtype=torch.float64), rank_of(frm)) if 0 <= frm < p else None
        y = (stage.forward if kind == "F" else stage.backward)(k, x)
        if 0 <= to < p:
            comm.send(y, rank_of(to))
