"""A lab's start: what a first run needs is there before the first check, and its failure is nobody's trouble."""

import pytest

from fourwalls.course import lab_ring
from fourwalls.course.drivers import rehearse
from fourwalls.course.lab import Lab
from fourwalls.course.stand_in import Failed, Failure
from fourwalls.ranks.run import simulate


class Fake:
    """A process that notes what it is asked to run, or is dead."""

    def __init__(self, error=None):
        self.asked, self.error = [], error

    def run(self, driver, functions, *, ranks):
        self.asked.append((driver, functions, ranks))
        if self.error:
            raise self.error


@pytest.mark.parametrize("error", [None, Failed(Failure("dead", "ended")), OSError("no process")])
def test_the_process_rehearses_once_and_a_failure_is_left_to_the_first_check(error):
    lab = Lab("ring", None, lab_ring.problems())
    lab._apart = fake = Fake(error)
    lab._warm()
    assert fake.asked == [("fourwalls.course.drivers.rehearse", [], 2)] and lab._apart is fake


def test_the_rehearsal_is_one_message_from_each_rank():
    run = simulate(rehearse, {}, ranks=2)
    assert run.trace.bytes_sent() == 8 and run.trace.bytes_sent(rank=1) == 4
