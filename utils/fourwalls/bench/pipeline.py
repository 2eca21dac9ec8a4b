"""Pipelines on real ranks: paced beside simulated, real compute beside torch's schedule of the same name.

Paced: every action sleeps for the time that it is given, so ranks may outnumber cores without getting in each other's way, and
what is measured is the schedule with its messages. Real: blocks of a GPT, forward and backward, in alternating pairs with
torch.distributed.pipelining in one process group; gradients are compared with it.

    bubble of total = 1 - work / (ranks x makespan)        error = measured - simulated, in percentage points

With them, two checks of the tool itself: how far measured and simulated bubbles are apart, in points, and the simulator's seconds
for more and more actions. `--ranks 8` takes about eight minutes on 2 cores; `--algorithms`
takes fewer schedules.

Reference: torch.distributed.pipelining, `ScheduleGPipe`, `Schedule1F1B`.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..cost.machine import allowed_cores
from ..nn.gpt import Block, GPTConfig
from ..parallel.pipeline import interleaved, schedules, v_shape, zero_bubble
from ..parallel.pipeline.actions import Schedule, placement
from ..parallel.pipeline.execute import execute
from ..parallel.pipeline.microbatches import MicroBatch, split_batch
from ..parallel.pipeline.simulate import Times, simulate
from ..ranks.run import pool
from .beside import time_row
from .record import Row
from .timer import alternate, spread

__all__ = ["SCHEDULES", "describe", "rows"]

describe = "pipeline schedules: paced bubble beside simulated, real compute beside torch's schedules"

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "naive": schedules.naive,
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "1f1b-doubled": partial(schedules.one_f_one_b, doubled=True),
    "interleaved": interleaved.interleaved_one_f_one_b,
    "breadth-first": interleaved.looped_breadth_first,
    "zb-h1": zero_bubble.zb_h1,
    "zb-h2": zero_bubble.zb_h2,
    "zb-v": v_shape.zb_v,
    "dualpipe-v": v_shape.dualpipe_v,
}
THEIRS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
PACE = 0.03  # least seconds of F, I and W of one stage and micro-batch
WIDTH, LENGTH, ROWS, BLOCKS, MICROBATCHES = 256, 64, 2, 8, 8
MESSAGE_BYTES = 64 * 2**10


def rows(options, say: Callable[[str], None] = lambda text: None, *, repeats: int = 5) -> Iterator[Row]:
    """Paced rows for each number of ranks (default 4, 8) and schedule, then real compute on 2 ranks beside torch's."""
    names = options.algorithms or list(SCHEDULES)
    wrong = [name for name in names if name not in SCHEDULES]
    if wrong:
        raise ValueError(f"no schedule {wrong[0]!r}; there are {', '.join(SCHEDULES)}")
    for ranks in options.ranks or (4, 8):
        with pool(ranks=ranks) as open_ranks:
            link = spread(open_ranks.run(ping, checks=False, stream=False).values[0]).value
            for name in names:
                say(f"pipeline {name}, {ranks} ranks, paced")
                count = ranks if name == "naive" else 2 * ranks  # naive takes p times as long for nothing new
                yield from _paced_rows(open_ranks, name, ranks, count, link, repeats)
    with pool(ranks=2) as open_ranks:
        for name in [n for n in names if n in THEIRS]:
            say(f"pipeline {name}, 2 ranks, beside torch")
            yield _beside_torch(open_ranks, name, options.pairs)
    say("pipeline simulator")
    yield from simulator_rows()


# --- paced ------------------------------------------------------------------------------------------------------------
def pace_of(ranks: int) -> float:
    """Seconds of an action: PACE for two ranks a core, more in proportion where more share one (their messages take turns)."""
    return PACE * max(1.0, ranks / (2 * allowed_cores()))


def paced_times(link: float = 0.0, *, pace: float = PACE) -> Times:
    """F, I and W of `pace` seconds each, on every stage; link: seconds of a message."""
    return Times(forward=pace, input=pace, weight=pace, link=link)


def ping(comm, repeats: int = 21) -> list[float]:
    """Seconds of one message of MESSAGE_BYTES between two ranks that have slept, as paced ones do: half of there and back."""
    x, taken = torch.ones(1, MESSAGE_BYTES // 4), []
    for _ in range(repeats if comm.rank < 2 else 0):
        time.sleep(PACE / 3)
        begin = time.perf_counter()
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(x, 1)
        else:
            comm.recv(x, 0)
            comm.send(x, 0)
        taken.append((time.perf_counter() - begin) / 2)
    return taken


def paced(comm, schedule: Schedule, times: Times, count: int) -> float:
    """Seconds from this rank's first action to the end of its last, after all ranks have met."""
    where, width = placement(schedule), MESSAGE_BYTES // 4
    modules = {s: _Scale() for s in where if where[s] == comm.rank}
    micro = [MicroBatch(k, torch.ones(1, width), torch.zeros(1, width)) for k in range(count)]
    comm.barrier()
    begin = comm.clock()
    execute(schedule, modules, comm, micro, _loss, seconds=times)
    return (comm.clock() - begin) / 1e12


def _paced_rows(open_ranks, name: str, ranks: int, count: int, link: float, repeats: int) -> Iterator[Row]:
    """The measured bubble, and by how many points it is above the simulated one."""
    schedule = SCHEDULES[name](ranks, count)
    pace = pace_of(ranks)
    times = paced_times(link, pace=pace)
    modelled = simulate(schedule, times)
    bubbles = []
    for _ in range(repeats + 1):  # the first warms up
        run = open_ranks.run(paced, schedule, times, count, checks=False, stream=False)
        work = [e for e in run.trace if e.lane == "compute" and e.kind in ("forward", "backward", "weight")]
        makespan = max(e.end for e in work) - min(e.start for e in work)
        bubbles.append(1 - sum(modelled.work) * 1e12 / (ranks * makespan))
    found = spread(bubbles[1:])
    case = {"schedule": name, "ranks": ranks, "microbatches": count, "pace": pace, "bytes": MESSAGE_BYTES, "link": link}
    yield Row(
        benchmark="pipeline",
        case=case,
        metric="bubble_of_total",
        value=found.value,
        unit="",
        low=found.low,
        high=found.high,
        pairs=repeats,
        peer=f"simulated: {modelled.bubble_of_total:.4f}, apart by {100 * (found.value - modelled.bubble_of_total):+.2f} points",
        source="paced",
        ok=abs(found.value - modelled.bubble_of_total) < 0.2,
    )
    apart = [100 * (bubble - modelled.bubble_of_total) for bubble in (found.value, found.low, found.high)]
    yield Row(
        benchmark="pipeline",
        case=case,
        metric="bubble_apart",
        value=apart[0],
        unit="points",
        low=apart[1],
        high=apart[2],
        pairs=repeats,
        peer=f"simulated: {modelled.bubble_of_total:.4f}; at most 2 points on a quiet machine",
        source="paced",
        ok=abs(apart[0]) < 20,
    )


def simulator_rows(sizes=((8, 64), (16, 128), (32, 256), (64, 512)), repeats: int = 5) -> Iterator[Row]:
    """Nanoseconds that the simulator needs for an action of 1F1B, for more and more actions: as many, if its time is linear."""
    for ranks, count in sizes:
        schedule, taken = schedules.one_f_one_b(ranks, count), []
        for _ in range(repeats):
            begin = time.perf_counter()
            simulate(schedule)
            taken.append((time.perf_counter() - begin) * 1e9 / (2 * ranks * count))
        found = spread(taken)
        yield Row(
            benchmark="pipeline",
            case={"schedule": "1f1b", "ranks": ranks, "microbatches": count, "actions": 2 * ranks * count},
            metric="simulator_time_per_action",
            value=found.value,
            unit="ns",
            low=found.low,
            high=found.high,
            pairs=repeats,
            source="measured",
            ok=True,
        )


class _Scale(torch.nn.Module):
    """One number: almost no work, so that an action takes the time it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


def _loss(y, target):
    return (y - target).square().sum()


# --- beside torch -----------------------------------------------------------------------------------------------------
def _beside_torch(open_ranks, name: str, pairs: int) -> Row:
    run = open_ranks.run(beside, name, pairs, checks=False, stream=False)
    case = {"schedule": name, "ranks": 2, "microbatches": MICROBATCHES, "blocks": BLOCKS, "width": WIDTH, "length": LENGTH}
    apart = max(v["apart"] for v in run.values)
    return time_row("pipeline", case, run, peer=f"torch.distributed.pipelining.{THEIRS[name]}", ok=apart < 1e-3)


def stage_module(rank: int) -> torch.nn.Module:
    """Half of the blocks."""
    config = GPTConfig(width=WIDTH, heads=4, length=LENGTH, layers=BLOCKS, seed=rank)
    return torch.nn.Sequential(*(Block(config) for _ in range(BLOCKS // 2)))


def beside(comm, name: str, pairs: int) -> dict:
    """Seconds of every step, ours and torch's, and how far the gradients are apart, relative to the largest."""
    from torch.distributed import pipelining

    schedule = SCHEDULES[name](2, MICROBATCHES)
    mine, theirs = stage_module(comm.rank), stage_module(comm.rank)
    theirs.load_state_dict(mine.state_dict())
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(ROWS * MICROBATCHES, LENGTH, WIDTH, generator=generator) for _ in range(2))
    micro = split_batch(x, target, count=MICROBATCHES)
    stage = pipelining.PipelineStage(theirs, comm.rank, 2, comm.device)
    runner = getattr(pipelining, THEIRS[name])(stage, MICROBATCHES, loss_fn=_loss, scale_grads=False)

    def ours():
        execute(schedule, {comm.rank: mine}, comm, micro, _loss)

    def torchs():
        runner.step(x) if comm.rank == 0 else runner.step(target=target)

    for work, model in ((ours, mine), (torchs, theirs)):
        work()
        model.zero_grad()
        work()
    pairs_of = zip(mine.parameters(), theirs.parameters(), strict=True)
    apart = max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs_of)
    taken = alternate(ours, torchs, pairs, before=comm.native.barrier, device=str(comm.device), repeats=1)
    return {"ours": taken[0], "theirs": taken[1], "apart": apart}
