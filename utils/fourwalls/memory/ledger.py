"""What a step keeps alive: every storage from birth to death, by category, by line, at each moment.

A dispatch mode sees each operation and notes storages that are new; a weak reference tells when one is freed; hooks on saved
tensors tell which of them backward waits for, and which source line saved them. Views share a storage and are counted once.
Nothing is allocated on the device `meta`, where the count is the same, so a layer of a 175B model can be weighed on a laptop.

    live(t) = sum of bytes of storages born before t and not yet freed        peak = max over t of live(t)

Reference: torch.autograd.graph.saved_tensors_hooks; Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for the categories.
Workspaces inside a kernel, and the allocator's rounding, are not seen.
"""

import linecache
import os
import time
from collections.abc import Callable, Iterable

import torch
from torch.utils._pytree import tree_leaves

from ..ranks.comm import Comm
from ..ranks.trace import Event, Trace
from .story import CATEGORIES, PASSING, Moment, Saved, Storage, Story
from .watch import Kept, Watch, line, new_storage

__all__ = ["CATEGORIES", "Ledger", "step_profile"]


class Ledger:
    """`with Ledger(model, optimizer) as ledger: loss = ...; loss.backward(); optimizer.step()`, then `ledger.table()`.

    model: its parameters (and buffers) are counted from the start, its gradients as they come. optimizer: anything whose `.state`
    maps parameters to dicts of tensors. inputs: tensors to count as inputs from the start; others that were made before the
    block are counted as inputs too, once an operation reads them. on_change: called with the live bytes after each operation, for
    instance. comm: a rank's communicator: moments are then those of its clock, and the live bytes go into its Trace. lines False
    skips looking up source lines, which is most of the cost.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer=None,
        *,
        inputs: Iterable[torch.Tensor] = (),
        on_change: Callable[[int], None] | None = None,
        comm: Comm | None = None,
        lines: bool = True,
    ):
        self._model, self._optimizer, self._inputs = model, optimizer, list(inputs)
        self._on_change, self._comm, self._lines = on_change, comm, lines
        self._marked: int | None = None  # what the Trace heard last
        self._known: dict[int, Storage] = {}  # by address of the storage's C++ object, living ones only
        self._all: list[Storage] = []
        self._resized: list[Storage] = []
        self._saves: list[Saved] = []
        self._phases: list[tuple[int, str]] = []
        self._ops: list[tuple[str, int]] = []  # (name of the operation, picoseconds since the start)
        self._clock, self._begin = 0, 0  # operations so far; picoseconds at the start
        self._path: list[str] = []  # modules whose forward is running, outermost first
        self._live = 0
        self._open = False

    # --- recording -------------------------------------------------------------------------------------------------
    def __enter__(self) -> "Ledger":
        if self._open or self._ops:
            raise RuntimeError("a Ledger records one block; make a new one")
        self._open, self._start = True, time.perf_counter_ns()
        self._begin = 0 if self._comm is None else self._comm.clock()
        self._handles = []
        if self._model is not None:
            for p in self._model.parameters():
                self._note(p, "parameters", 0)
                if p.grad is not None:
                    self._note(p.grad, "gradients", 0)
                if p.requires_grad:
                    self._handles.append(p.register_post_accumulate_grad_hook(lambda p: self._label(p.grad, "gradients")))
            for b in self._model.buffers():
                self._note(b, "parameters", 0)
            for name, module in self._model.named_modules():
                self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._path.append(name)))
                self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        self._scan()
        for x in self._inputs:
            self._note(x, "inputs", 0)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: Kept(self, t), Kept.unpack)
        self._watch = Watch(self)
        self._hooks.__enter__()
        self._watch.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._watch.__exit__(*error)
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._scan()
        self._tick("end")
        self._open = False

    def phase(self, name: str) -> None:
        """What follows belongs to phase `name`, e.g. "forward"."""
        self._scan()
        self._tick(f"begin {name}")  # a moment of its own: what the last operation left to be freed is gone
        self._phases.append((self._clock, name))

    def claim(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count these storages as `category` from their birth on, for instance the buckets of a strategy as "buffers"."""
        if category not in CATEGORIES:
            raise ValueError(f"category is {category!r}; allowed: {', '.join(CATEGORIES)}")
        for x in tensors:
            self._note(x, "inputs", 0)
            self._label(x, category)

    def _scan(self) -> None:
        for p in self._model.parameters() if self._model is not None else ():
            self._label(p.grad, "gradients")
        for state in getattr(self._optimizer, "state", {}).values():
            for value in tree_leaves(dict(state)):
                if isinstance(value, torch.Tensor):
                    self._note(value, "optimizer", 0)
                    self._label(value, "optimizer")

    def _note(self, tensor: torch.Tensor, category: str, moment: int) -> Storage | None:
        """The record of the tensor's storage; made if it is new, alive from `moment` on. Storages can grow, so the size is
        looked at.
        """
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        entry = self._known.get(key)
        if entry is None:
            where = line() if self._lines and category in PASSING else ("", 0, "")
            entry = new_storage(len(self._all), storage, size, moment, category, where, lambda entry: self._free(key, entry))
            self._all.append(entry)
            self._known[key] = entry
            self._live += size
        else:
            self._resize(entry, size, moment)
        return entry

    def _resize(self, entry: Storage, size: int, moment: int) -> None:
        if entry.bytes != size:
            if len(entry.sizes) == 1:
                self._resized.append(entry)
            self._live += size - entry.bytes
            entry.bytes = size
            entry.sizes.append((max(moment, self._clock), size))

    def _look_again(self) -> None:
        """What has changed its size may do so again, in another thread, where no operation of this one shows it."""
        for entry in self._resized:
            storage = entry.guard()
            if storage is not None:
                self._resize(entry, storage.nbytes(), self._clock + 1)

    def _free(self, key: int, entry: Storage) -> None:
        if self._known.get(key) is entry:
            del self._known[key]
        if self._open:
            entry.died = self._clock
            self._live -= entry.bytes

    def _label(self, tensor: torch.Tensor | None, category: str) -> None:
        """From its birth on, the storage belongs to `category`."""
        if tensor is not None and tensor.layout == torch.strided:
            entry = self._known.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry.category in (*PASSING, "inputs"):
                entry.category = category

    def _save(self, tensor: torch.Tensor) -> Storage | None:
        entry = self._note(tensor, "inputs", 0)
        if entry is not None:
            entry.holders += 1
            entry.was_saved = True
            where = line() if self._lines else ("", 0, "")
            module = self._path[-1] if self._path else ""
            self._saves.append(Saved(entry, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), where, module))
        return entry

    def _release(self, entry: Storage | None) -> None:
        if entry is not None:
            entry.holders -= 1
            entry.released = self._clock

    def _leave(self) -> None:
        if self._path:
            self._path.pop()

    def _tick(self, name: str) -> None:
        self._clock += 1
        now = (time.perf_counter_ns() - self._start) * 1000 if self._comm is None else self._comm.clock()
        self._ops.append((name, now))
        if self._on_change is not None:
            self._on_change(self._live)
        if self._comm is not None and self._live != self._marked:
            self._marked = self._live
            self._comm.mark_live(self._live)

    # --- answers ---------------------------------------------------------------------------------------------------
    @property
    def live(self) -> int:
        """Bytes alive now (after the block: at its end)."""
        return self._live

    def story(self) -> Story:
        """Everything that was recorded, for `curve`, `table` and the rest, which are shorthands."""
        return Story(self._all, self._saves, self._phases, self._ops, self._begin)

    @property
    def peak(self) -> int:
        """The most bytes alive after any one operation."""
        return max(m.total for m in self.curve())

    def curve(self) -> list[Moment]:
        """Live bytes by category: before the first operation (index 0), after each one, and where a phase begins."""
        return self.story().curve()

    def rows(self) -> list[tuple[int, dict[str, int]]]:
        """The curve as (operation, bytes by category), as `viz.memory.plot_memory_mountain` takes it."""
        names = self.story().categories()
        return [(m.index, {c: m.bytes[c] for c in names}) for m in self.curve()]

    def phases(self) -> list[tuple[str, int, int]]:
        """(name, first moment, last moment) of each phase."""
        ends = self.story().ends()
        return [(name, begin, ends[name]) for begin, name in self._phases]

    def saved(self, phase: str | None = None) -> int:
        """Bytes of activations that backward waited for at the end of `phase` (default: the most at any time), by storage."""
        if phase is not None:
            return self.story().at(phase).bytes["activations"]
        return max(m.bytes["activations"] for m in self.curve())

    def saved_tensors(self) -> list[Saved]:
        """Each activation storage that was saved, once, in order, with shape, dtype, bytes and the line that saved it first."""
        return self.story().saved_tensors()

    def by_line(self) -> dict[tuple[str, int, str], int]:
        """(file, line, function) -> bytes of activations first saved there, largest first; the nearest line outside torch."""
        return self.story().by("where")

    def by_module(self) -> dict[str, int]:
        """Path of the module in whose forward they were first saved -> bytes of activations, largest first."""
        return self.story().by("module")

    def table(self) -> str:
        """Bytes by category at the end of each phase and at the peak, as text."""
        return self.story().table()

    def lines(self, most: int = 10) -> str:
        """`by_line` as text with the source beside it."""
        rows = [
            f"{n:>14,} B  {os.path.basename(file)}:{line:<4} {linecache.getline(file, line).strip()[:80]}"
            for (file, line, _), n in list(self.by_line().items())[:most]
        ]
        return "\n".join(rows)

    def trace(self, rank: int | None = None) -> Trace:
        """The curve as "live" events on the memory lane, and the phases as marks, in the time of the rank's clock."""
        comm, moments = self._comm, self.curve()
        rank = rank if rank is not None else 0 if comm is None else comm.rank
        source = "modelled" if comm is not None and comm.simulated else "measured"
        events = [Event(rank, "memory", "live", m.op, m.time_ps, m.time_ps, m.total, source=source) for m in moments]
        for index, name in self._phases:
            at = moments[min(index, len(moments) - 1)].time_ps
            events.append(Event(rank, "mark", "mark", name, at, at, source=source))
        return Trace(events, ranks=rank + 1)


def step_profile(model: torch.nn.Module, loss_fn: Callable[[torch.nn.Module], torch.Tensor], optimizer=None, **options) -> Ledger:
    """Run one training step under a Ledger, with phases "forward", "backward" and "optimizer": the memory mountain.

    loss_fn(model) returns a scalar loss. Gradients from before are dropped first. The loss itself is released after backward.
    """
    for p in model.parameters():
        p.grad = None
    with Ledger(model, optimizer, **options) as ledger:
        ledger.phase("forward")
        loss = loss_fn(model)
        ledger.phase("backward")
        loss.backward()
        del loss
        if optimizer is not None:
            ledger.phase("optimizer")
            optimizer.step()
    return ledger
