"""What every stage keeps on real ranks, after every action of every schedule, is what the list of actions says, to the byte."""

from collections import Counter

import torch

import fourwalls as fw
from fourwalls.parallel.pipeline import interleaved, schedules, v_shape, zero_bubble
from fourwalls.parallel.pipeline.actions import parts, placement, stages_of
from fourwalls.parallel.pipeline.execute import execute
from fourwalls.parallel.pipeline.microbatches import MicroBatch, split_batch
from fourwalls.parallel.pipeline.simulate import simulate

from .small_stages import W, batch, layer, squares

MEMORY = {
    "naive": schedules.naive(4, 5),
    "gpipe": schedules.gpipe(4, 6),
    "1f1b": schedules.one_f_one_b(4, 7),
    "1f1b doubled": schedules.one_f_one_b(4, 9, doubled=True),
    "interleaved": interleaved.interleaved_one_f_one_b(4, 8, 2),
    "breadth first": interleaved.looped_breadth_first(4, 6, 2),
    "zb-h1": zero_bubble.zb_h1(4, 7),
    "zb-h2": zero_bubble.zb_h2(4, 8),
    "zb-v": v_shape.zb_v(4, 8),
    "dualpipe-v": v_shape.dualpipe_v(4, 8),
}


class Saved:
    """What autograd keeps for backward: bytes by storage, counted while anybody holds it; parameters are left out."""

    def __init__(self, modules):
        self.own = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters()}
        self.held = Counter()

    @property
    def bytes(self):
        return sum(nbytes for (_, nbytes), holders in self.held.items() if holders)

    def pack(self, tensor):
        key = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        return _Held(self.held if key[0] not in self.own else Counter(), key, tensor)


class _Held:
    def __init__(self, held, key, tensor):
        self.held, self.key, self.tensor = held, key, tensor
        held[key] += 1

    def __del__(self):
        self.held[self.key] -= 1


def live_bytes(comm, names):
    """name -> after each action: (action, bytes that autograd keeps, bytes of put-off products). A received buffer that waits for
    its F is a message, not an activation.
    """
    found = {}
    for name in names:
        schedule = MEMORY[name]
        where = placement(schedule)
        mine = {s: layer(s) for s in where if where[s] == comm.rank}
        count = 1 + max(a.microbatch for row in schedule for cell in row for a in parts(cell))
        micro = [MicroBatch(m.index, m.inputs.clone(), m.targets) for m in split_batch(*batch(4 * count), count=count)]
        seen, stages, saved = [], {}, Saved(mine.values())

        def watch(action, running, stages=stages, seen=seen, saved=saved):
            stages[action.stage] = running
            apart = sum(k.later.bytes for s in stages.values() for k in s._kept.values() if k.later and k.edge is None)
            seen.append((action, saved.bytes, apart))

        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
            execute(schedule, mine, comm, micro, squares, watch=watch)
        found[name] = seen
    return found


def test_live_bytes_of_every_stage_are_as_simulated():
    """On real ranks, after every action of every schedule: what autograd keeps is what the list of actions says, to the byte."""
    run = fw.run(live_bytes, list(MEMORY), ranks=4)
    full, half = {}, {}  # kind of stage -> bytes of one micro-batch after F, and after I
    for value in run.values:
        first, then = value["naive"][:2]
        assert first[1] > 0 and then[1] == 0
    for name, schedule in MEMORY.items():
        split, last = any(a.kind == "I" for row in schedule for cell in row for a in parts(cell)), stages_of(schedule) - 1

        def kind_of(stage, split=split, last=last):  # the last stage keeps what its loss needs too
            return split, stage == last

        for rank, value in enumerate(run.values):
            held = {}  # (stage, micro-batch) -> what it holds, "F" or "I"
            for action, activations, apart in value[name]:
                key = action.stage, action.microbatch
                if action.kind == "F":
                    held[key] = "F"
                elif action.kind == "I":
                    held[key] = "I"
                else:
                    del held[key]
                alone = [k for k, what in held.items() if what == "F"]
                if len(alone) == 1 and activations:
                    assert full.setdefault(kind_of(alone[0][0]), activations) == activations
                if len(held) - len(alone) == 1:
                    put_off = next(k[0] for k, what in held.items() if what == "I")
                    assert half.setdefault(put_off == last, apart) == apart
                assert apart == sum(half[k[0] == last] for k, what in held.items() if what == "I"), (name, action)
                if all(kind_of(k[0]) in full for k in alone):
                    # the output of a stage is the input of the next one: on one rank they are one tensor
                    twice = sum((s + 1, m) in alone for s, m in alone) * 4 * W * 8
                    assert activations == sum(full[kind_of(k[0])] for k in alone) - twice, (name, rank, action)
            assert not held
        if not split:
            sizes = [full[kind_of(s)] for s in range(last + 1)]
            peaks = [max(a for _, a, _ in value[name]) for value in run.values]
            assert peaks == list(simulate(schedule, activation=sizes).peaks), name
