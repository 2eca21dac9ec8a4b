"""ZeRO's stage 3, also called fully sharded data parallelism: a rank holds 1/n of the model, and borrows the rest unit by unit.

A unit (a transformer block, say) is gathered just before its forward, and its memory is given back just after; before its
backward it is gathered again, and as soon as its gradients are complete they are summed into shards and given back too. While
one unit computes, the next one is already on its way.

    parameters and gradients at any time  <=  shards + 2 gathered units        sent in a step = 3 Psi (n-1)/n elements

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7.2.2; Zhao et al. 2023 (arXiv:2304.11277) for units, prefetching.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from .zero_base import Sharded
from .zero_shards import Flat, cut_parameters

__all__ = ["Unit", "Zero3", "default_units"]


def default_units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of the model's outermost ModuleLists and Sequentials that have parameters: its blocks, in their order."""
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)):
        return [m for m in model if any(True for _ in m.parameters())]
    return [unit for child in model.children() for unit in default_units(child)]


class Unit:
    """What is gathered and freed together. state: "free", "coming" (tickets) or "here". waiting: gradients that backward owes."""

    def __init__(self, name: str, module: torch.nn.Module, flats: list[Flat]):
        self.name, self.module, self.flats, self.state, self.tickets = name, module, flats, "free", []
        self.owed = {id(p) for flat in flats if flat.trained for p in flat.params}
        self.waiting: set[int] | None = None  # None: its backward is not under way

    @property
    def bytes(self) -> int:
        """Of its parameters, gathered."""
        return sum(flat.bytes for flat in self.flats)


class Zero3(Sharded):
    """Stage 3. units: modules in the order of their use (default: the blocks of the model). What is in none of them, or in
    several (tied), belongs to the model as a whole: it is here from the begin of the model's forward to its end, and so in
    backward.

    prefetch: gather the next unit while this one computes. Outside of forward and backward every parameter has shape (0,);
    `full_parameters()` and `with zero.gathered():` give them. Every rank must run the same units in the same order.
    """

    stage = 3

    def __init__(self, model, comm, *, units: Iterable[torch.nn.Module] | None = None, prefetch: bool = True, **options):
        self.prefetch = prefetch
        self._modules = default_units(model) if units is None else list(units)
        self._running = False
        super().__init__(model, comm, **options)
        for unit in self.units:
            self._hooks.append(unit.module.register_forward_pre_hook(lambda _, args, unit=unit: self._before_forward(unit, args)))
            self._hooks.append(unit.module.register_forward_hook(lambda _, args, out, unit=unit: self._after_forward(unit, out)))
            for p in (p for flat in unit.flats if flat.trained for p in flat.params):
                self._hooks.append(p.register_post_accumulate_grad_hook(lambda p, unit=unit: self._arrived(unit, id(p))))

    def _lay_out(self, named):
        names = {id(m): name for name, m in self.model.named_modules()}
        strangers = [m for m in self._modules if id(m) not in names]
        if strangers:
            raise ValueError(f"units: {type(strangers[0]).__name__} is no module of this model; take them from model.modules()")
        homes: dict[int, list] = {}
        for module in self._modules:
            for p in module.parameters():
                homes.setdefault(id(p), []).append(module)
        if any(len(set(map(id, found))) < len(found) for found in homes.values()):
            raise ValueError("units: a module is given twice; each unit once, in the order of use")
        self.units = []
        for p in (p for _, p in named if len(homes.get(id(p), ())) != 1):
            homes[id(p)] = [self.model]
        for module in [self.model, *(m for m in self._modules if m is not self.model)]:
            own = [(name, p) for name, p in named if homes[id(p)] == [module]]
            if own:
                flats = cut_parameters(own, self.comm.size, self.comm.rank, keep_whole=False)
                self.units.append(Unit(names[id(module)] or "the model", module, flats))
        self._root = self.units[0] if self.units[0].module is self.model else None
        return [flat for unit in self.units for flat in unit.flats]

    # --- memory ----------------------------------------------------------------------------------------------------
    def _begin_gather(self, unit: Unit) -> None:
        if unit.state == "free":
            for flat in unit.flats:
                flat.grow()
            unit.tickets = [self._lane.start(f"gather {unit.name}", self._gather_into, flat) for flat in unit.flats]
            unit.state = "coming"

    def _gather(self, unit: Unit) -> None:
        """Its parameters are whole afterwards."""
        self._begin_gather(unit)
        if unit.state == "coming":
            for ticket in unit.tickets:
                self._lane.wait(ticket)
            for flat in unit.flats:
                flat.show()
            unit.state = "here"

    def _free(self, unit: Unit) -> None:
        if unit.state == "coming":
            for ticket in unit.tickets:
                self._lane.wait(ticket)
        if unit.state != "free":
            for flat in unit.flats:
                flat.shrink()
            unit.state = "free"

    def _ahead(self, unit: Unit, step: int) -> None:
        """Begin to gather the neighbour of `unit` in the order of use."""
        place = self.units.index(unit) + step
        if self.prefetch and 0 <= place < len(self.units):
            self._begin_gather(self.units[place])

    @contextmanager
    def gathered(self) -> Iterator[torch.nn.Module]:
        """`with zero.gathered() as model:` all parameters are whole, to read. Every rank must enter."""
        for unit in self.units:
            self._gather(unit)
        try:
            yield self.model
        finally:
            for unit in self.units:
                self._free(unit)

    # --- forward ---------------------------------------------------------------------------------------------------
    def _before_forward(self, unit, args):
        self._gather(unit)
        self._ahead(unit, 1)
        if not unit.owed and torch.is_grad_enabled():  # frozen: no gradient of its own tells when its backward is over
            for x in args:
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    x.register_hook(lambda _: self._free(unit))

    def _after_forward(self, unit, out):
        self._free(unit)
        if torch.is_grad_enabled():
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    x.register_hook(lambda _: self._before_backward(unit))

    # --- backward --------------------------------------------------------------------------------------------------
    def _before_backward(self, unit):
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if unit.waiting is None:
            unit.waiting = set(unit.owed)
            self._gather(unit)
            self._ahead(unit, len(self.units) - 1 if unit is self._root else -1)

    def _arrived(self, unit, which):
        unit.waiting.discard(which)
        if not unit.waiting:
            self._after_backward(unit)

    def _after_backward(self, unit):
        """All of its gradients are there: give the parameters back, then sum the gradients into the shards."""
        self._free(unit)
        while self._flying:
            self._land()
        for flat in unit.flats:
            if flat.trained:
                self._launch(flat)
        unit.waiting = None

    def _finish(self):
        """Backward is over. A unit with a parameter that had no gradient is still here."""
        self._running = False
        for unit in reversed(self.units):
            if unit.waiting is not None:
                self._after_backward(unit) if unit.owed else self._free(unit)
                unit.waiting = None
        while self._flying:
            self._land()
        for unit in self.units:
            self._free(unit)

    def reduce(self):
        """Nothing is left to do: backward has done it."""
