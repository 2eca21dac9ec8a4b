"""All-gather and product in one, beside gather first and multiply then: paced on real ranks, beside simulated.

Real processes send real messages, and values are checked; but a product sleeps for a stated time, and a message is done no
earlier than a stated wire would have it. So ranks may outnumber cores, and what is measured is the order of things: does the
next rank's block really travel while this one's is multiplied? The simulator is given the same wire and the same times.

    speed_up = time of gather, then multiply / time of both in one,      apart = paced / simulated - 1

Reference: Wang et al., ASPLOS 2023 (see kernels/gathered_product.py).
"""

from collections.abc import Callable, Iterator

import torch

from ..cost.hardware import Link, uniform
from ..kernels.gathered_product import gathered_product
from ..ranks.comm import Comm, Request
from ..ranks.run import pool, simulate
from ..ranks.trace import PS
from .record import Row
from .timer import spread

__all__ = ["PacedLink", "compare", "describe", "paced", "rows", "rows_of"]

describe = "product of all-gathered rows, a block multiplied while the next travels: paced speed-up beside simulated"
ROWS, WIDTH, COLUMNS = 64, 256, 64  # of each rank's x, and of w
PACE = 0.03  # seconds of the product of one rank's rows
SHARES = (0.5, 1.0, 2.0)  # time of a message / time of a product
ALPHA = 0.001


class PacedLink(Comm):
    """A rank's communicator on which no message is done before a stated wire would have carried it; the rest is the real one's.

    The time counts from when this rank began the message. What is slept is recorded as a wait, and is paced.
    """

    def __init__(self, comm: Comm, link: Link):
        self._comm, self._link = comm, link
        self.rank, self.size, self.device, self.seed = comm.rank, comm.size, comm.device, comm.seed
        self.simulated, self.checks, self.records_work = comm.simulated, comm.checks, comm.records_work

    def isend(self, x, to, tag=0):
        return _Due(self, self._comm.isend(x, to, tag), x.nbytes)

    def irecv(self, buf, frm, tag=0):
        return _Due(self, self._comm.irecv(buf, frm, tag), buf.nbytes)

    def barrier(self):
        self._comm.barrier()

    def split(self, color, key=0):
        part = self._comm.split(color, key)
        return None if part is None else PacedLink(part, self._link)

    def agree(self, call):
        self._comm.agree(call)

    def compute(self, label, **options):
        return self._comm.compute(label, **options)

    def clock(self):
        return self._comm.clock()

    def mark_live(self, bytes):
        self._comm.mark_live(bytes)

    @property
    def native(self):
        return self._comm.native


class _Due(Request):
    """A message that is done when it has come and its time has, too."""

    def __init__(self, comm: PacedLink, request: Request, nbytes: int):
        self.comm, self.request = comm, request
        self.due = comm.clock() + comm._link.picoseconds(nbytes)

    def wait(self):
        left = self.due - self.comm.clock()
        if left > 0:
            with self.comm.compute("wait for the wire", seconds=left / PS, kind="wait"):
                pass
        return self.request.wait()

    @property
    def done(self):
        return self.comm.clock() >= self.due and self.request.done


def paced(comm, seconds: float, link: Link | None, pairs: int) -> dict:
    """Seconds of each of `pairs` products, gathered first ("apart") and in one ("overlapped"), in turns; "right": the values are.

    seconds: of the product of one rank's rows. link: the wire to keep to, or None on simulated ranks, which have one.
    """
    wire = comm if link is None else PacedLink(comm, link)
    inputs = [torch.arange(ROWS * WIDTH).remainder(7).sub(3 + r).float().view(ROWS, WIDTH) for r in range(comm.size)]
    w = torch.arange(WIDTH * COLUMNS).remainder(5).sub(comm.rank).float().view(WIDTH, COLUMNS)
    inputs, w = [x.to(comm.device) for x in inputs], w.to(comm.device)
    want, taken, right = torch.cat(inputs) @ w, {"apart": [], "overlapped": []}, True  # whole numbers: exact
    for pair in range(pairs):
        for form in ("apart", "overlapped") if pair % 2 == 0 else ("overlapped", "apart"):
            comm.barrier()
            begin = comm.clock()
            y = gathered_product(wire, inputs[comm.rank], w, overlap=form == "overlapped", seconds=seconds / ROWS)
            taken[form].append((comm.clock() - begin) / PS)
            right = right and torch.equal(y, want)
    return {**taken, "right": right}


def compare(open_ranks, ranks: int, share: float, pairs: int, *, pace: float = PACE) -> tuple[list[float], float, bool]:
    """(paced speed-ups, pair by pair, of the slowest rank's times; the simulated one; whether all values were right)."""
    link = Link("stated", ALPHA, ROWS * WIDTH * 4 / (share * pace - ALPHA), source="stated by the benchmark")
    found = open_ranks.run(paced, pace, link, pairs, stream=False).values
    modelled = simulate(paced, pace, None, 1, ranks=ranks, cluster=uniform(link.alpha, link.bandwidth)).values
    slowest = [
        {form: [max(times) for times in zip(*(v[form] for v in values), strict=True)] for form in ("apart", "overlapped")}
        for values in (found, modelled)
    ]
    real, model = ([a / b for a, b in zip(s["apart"], s["overlapped"], strict=True)] for s in slowest)
    return real, model[0], all(v["right"] for v in (*found, *modelled))


def rows(options, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """For each number of ranks (default 2, 4) and each of SHARES: the paced speed-up, and how far that is from the simulated."""
    for ranks in options.ranks or (2, 4):
        with pool(ranks=ranks) as open_ranks:
            for share in SHARES:
                say(f"gathered product, {ranks} ranks, message / product = {share:g}")
                yield from rows_of(*compare(open_ranks, ranks, share, options.pairs), ranks, share)


def rows_of(real: list[float], model: float, right: bool, ranks: int, share: float) -> Iterator[Row]:
    """Two rows from what `compare` gives back: the speed-up, and by how many per cent it is apart from the simulated one."""
    found, apart = spread(real), spread(100 * (s / model - 1) for s in real)
    common = {
        "benchmark": "gathered-product",
        "case": {"ranks": ranks, "message_to_product": share, "pace": PACE},
        "pairs": found.count,
        "source": "paced",
    }
    ok = right and abs(apart.value) < 40
    yield Row(
        metric="speed_up", value=found.value, unit="x", low=found.low, high=found.high,
        peer=f"simulated: {model:.3f}", ok=ok, **common,
    )  # fmt: skip
    yield Row(
        metric="apart", value=apart.value, unit="%", low=apart.low, high=apart.high,
        peer=f"simulated: {model:.3f}; at most 10% on a quiet machine", ok=ok, **common,
    )  # fmt: skip
