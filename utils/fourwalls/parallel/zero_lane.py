"""A lane on which collectives travel one after the other while this rank computes, each with a ticket for its result.

Stage 3 asks for a unit's parameters before it needs them and comes back for them later, while a reduce-scatter given in between
is still under way: so what it waits for is one ticket, not the whole lane.

    ticket = lane.start("gather block 1", all_gather, shard)  ...  compute  ...  whole = lane.wait(ticket)

Reference: `ranks.beside`; Zhao et al. 2023 (arXiv:2304.11277), section 3.3, for what is given in which order.
"""

from collections.abc import Callable

import torch

from ..ranks.beside import Beside, Job
from ..ranks.comm import Comm

__all__ = ["Lane", "Ticket"]


class Ticket:
    """Something that was started. `result` is there once it has been waited for."""

    __slots__ = ("job", "result")

    def __init__(self):
        self.job: Job | None = None
        self.result = None


class Lane:
    """`start(label, function, *args)` calls function(comm, *args) beside the program, `wait(ticket)` gives its result.

    overlap False (or one rank): at once. Otherwise the lane has a communicator of its own, so every rank must make it.
    """

    def __init__(self, comm: Comm, *, overlap: bool = True):
        self.comm, self._beside = comm, None
        if overlap and comm.size > 1:
            self.comm = comm.split(0, comm.rank)
            self._beside = Beside(self.comm)

    def start(self, label: str, function: Callable, *args, **options) -> Ticket:
        """Begin `function(comm, *args, **options)`; its tensors must stay untouched until `wait`."""
        ticket = Ticket()
        cuda = self.comm.device.type == "cuda"

        def work():
            if cuda:  # a thread starts on device 0
                torch.cuda.set_device(self.comm.device)
            with torch.no_grad():
                ticket.result = function(self.comm, *args, **options)

        if self._beside is None:
            work()
        else:
            ticket.job = self._beside.start(label, work)
        return ticket

    def wait(self, ticket: Ticket):
        """The result of `ticket`, when it and all that was started before it are over. Raises what its function raised."""
        if ticket.job is not None:
            given = self._beside.jobs
            if ticket.job in given:  # else it was waited for with a later one
                count = given.index(ticket.job) + 1
                self._beside.jobs, rest = given[:count], given[count:]
                self._beside.join()
                self._beside.jobs = rest
                if rest and self.comm.simulated:  # jobs go one at a time: the next cannot have begun before this one's end
                    rest[0].given = max(rest[0].given, ticket.job.end)
            ticket.job = None
        result, ticket.result = ticket.result, None
        return result
