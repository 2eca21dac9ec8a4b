"""ZeRO's stage 3, also called fully sharded data parallelism: a rank holds 1/n of the model, and borrows the rest unit by unit.

A unit (a transformer block, say) is gathered just before its forward, and its memory is given back just after; before its
backward it is gathered again, and as soon as its gradients are complete they are summed into shards and given back too.

    parameters and gradients at any time  <=  shards + 2 units        sent in a step = 3 Psi (n-1)/n elements

In forward the next unit is already on its way while one computes: two. At the end of its backward a unit's parameters and its
gradients are both there, which is two already. So by default the next one is asked for when this one has given its own back, and
travels behind the sum: nothing is hidden there. prefetch="early" asks for it while this one computes, and holds a third. The lane
carries one thing at a time, and takes the next unit's memory only when the sum before it has given its own back. The most whole
units at a time, and what a step of L units waits for (where computing a unit takes longer than a gather or a sum):

    in backward                parameters   gradients   together       a step waits for
    default: prefetch="late"       1            2           2          L + 1 gathers, L sums
    prefetch="early"               2            2           3          2 gathers, 1 sum
    prefetch=False                 1            2           2          2 L gathers, L sums
    overlap=False                as above                              2 L gathers, L sums

In forward it is two of parameters, without prefetch one. Two of gradients are there only while they are packed, when the unit's
parameters are gone. What is in no unit (tied weights, say) is there all the time, on top; so is a unit with a parameter or an
input that had no gradient, until backward ends. Torch's first FSDP calls the two ways BACKWARD_POST and BACKWARD_PRE.

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7.2.2; Zhao et al. 2023 (arXiv:2304.11277) for units, prefetching.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..collectives.agree import agree
from .replicas import checksum
from .wrapped import Hook
from .zero_base import Sharded
from .zero_shards import Flat, cut_parameters

COPY = (
    "a copy of this model would hold no parameters, since ZeRO's stage 3 has cut them into shards, and its hooks would belong to "
    "the original; take full_parameters(), and load them into a model that is built anew"
)
STATE = (
    "stage 3 has cut the parameters into shards, so a state_dict would be empty; take full_parameters(), or state_dict() inside "
    "`with zero.gathered():`"
)

PREFETCH = ("late", "early", True, False)

__all__ = ["Unit", "Zero3", "default_units"]


def default_units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of the model's outermost ModuleLists and Sequentials that have parameters: its blocks, in their order."""
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)):
        return [m for m in model if any(True for _ in m.parameters())]
    return [unit for child in model.children() for unit in default_units(child)]


def _in_backward() -> bool:
    """Autograd is at work in this thread."""
    return torch._C._current_graph_task_id() != -1


class Unit:
    """What is gathered and freed together. state: "free", "coming" (tickets) or "here". waiting: gradients that backward owes."""

    def __init__(self, name: str, module: torch.nn.Module, flats: list[Flat]):
        self.name, self.module, self.flats, self.state, self.tickets = name, module, flats, "free", []
        self.owed = {id(p) for flat in flats if flat.trained for p in flat.params}
        self.waiting: set[int] | None = None  # None: its backward is not under way
        self.visits: list[Visit] = []  # those that backward has reached
        self.visit = Visit()  # the last forward's

    @property
    def bytes(self) -> int:
        """Of its parameters, gathered."""
        return sum(flat.bytes for flat in self.flats)


class Visit:
    """One forward of a unit. inputs: how many of its tensors backward will bring a gradient for; left: those still to come."""

    __slots__ = ("inputs", "left")

    def __init__(self):
        self.inputs = self.left = 0


class Zero3(Sharded):
    """Stage 3. units: modules in the order of their use (default: the blocks of the model). What is in none of them, or in
    several (tied), belongs to the model as a whole: it is here from the begin of the model's forward to its end, and so in
    backward.

    prefetch: when the next unit is asked for in backward. "late", which True means too: when this one has given its own back.
    "early": while this one computes, which hides the gather and holds a third unit. (In forward both ask early, since the next
    one is the second.) False: when it is needed, in forward too. The values and what is sent are the same.

    Outside of forward and backward every parameter has shape (0,), and a state_dict or a copy of the model is refused;
    `full_parameters()` and `with zero.gathered():` give them, `close()` gives them back. Every rank must run the same units in
    the same order.
    """

    stage = 3

    def __init__(self, model, comm, *, units: Iterable[torch.nn.Module] | None = None, prefetch: str | bool = "late", **options):
        if prefetch not in PREFETCH:
            raise ValueError(f"prefetch is {prefetch!r}; allowed: 'late' (True means it), 'early' (a unit more), False")
        self.prefetch = "late" if prefetch is True else prefetch
        self._modules = default_units(model) if units is None else list(units)
        self._running = False
        self._held = 0  # how many `with gathered()` are open
        super().__init__(model, comm, **options)
        for module in model.modules():
            self._hang(module.register_state_dict_pre_hook, self._before_state_dict)
            self._hang(module.register_state_dict_post_hook, self._after_state_dict)
        for unit in self.units:
            before = lambda _, args, kwargs, unit=unit: self._before_forward(unit, args, kwargs)  # noqa: E731
            after = lambda _, args, out, unit=unit: self._after_forward(unit, out)  # noqa: E731
            self._hang(unit.module.register_forward_pre_hook, before, with_kwargs=True)
            self._hang(unit.module.register_forward_hook, after)
            for p in (p for flat in unit.flats if flat.trained for p in flat.params):
                self._hooks.append(p.register_post_accumulate_grad_hook(lambda p, unit=unit: self._arrived(unit, id(p))))

    def _hang(self, register, function, **options):
        self._hooks.append(register(Hook(function, COPY), **options))

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
            if not self._flying:  # else the lane has a sum to end first, whose buffer goes before `_gather_into` takes this
                for flat in unit.flats:
                    flat.grow()
            unit.tickets = [self._begin_to_gather(flat, f"gather {unit.name}") for flat in unit.flats]
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
            while self._flying and self.prefetch != "early":  # over too, as it was before this in the lane: let go of it
                self._land()

    def _free(self, unit: Unit) -> None:
        if self._held:
            return
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

    def _free_the_passed(self, unit: Unit) -> None:
        """`unit` is next. What was asked for in its stead, and is not used, would be one more."""
        for other in self.units:
            if other is not unit and other.state == "coming":
                self._free(other)

    @contextmanager
    def gathered(self) -> Iterator[torch.nn.Module]:
        """`with zero.gathered() as model:` all parameters are whole, and stay so in a forward. Every rank must enter.

        To read, or to write (`load_state_dict`): each rank keeps its part of what is there at the end, so write the same on all
        (MismatchError with checks on).
        """
        for unit in self.units:
            self._gather(unit)
        self._held += 1
        try:
            yield self.model
            if self.comm.checks and self.comm.size > 1:
                told = {"steps taken": self.steps, "checksum of the parameters": checksum(self.model.parameters())}
                agree(self.comm, "the end of gathered()", **told)
        finally:
            self._held -= 1
            for unit in self.units if not self._held else ():
                for flat in unit.flats:
                    flat.keep()
                self._free(unit)

    def close(self) -> None:
        """Take the hooks off the model and give it whole parameters back. Every rank must call it."""
        with self.gathered():
            whole = {p: p.detach().clone() for unit in self.units for flat in unit.flats for p in flat.params}
        super().close()
        for p, values in whole.items():
            p.data = values

    def _before_state_dict(self, module, prefix, keep_vars):
        if not self._held and any(True for _ in module.parameters(recurse=False)):
            raise ValueError(STATE)

    def _after_state_dict(self, module, state, prefix, local):
        """What is taken inside `gathered` must outlive it."""
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = state[prefix + name].clone()

    def _publish(self) -> None:
        """After a step nothing that was gathered before it is true any more: a forward that raised has left it there."""
        if self._held:
            raise ValueError("step() inside `with gathered():`, whose end would undo it; step after the block")
        for unit in self.units:
            self._free(unit)

    def _give_up(self) -> None:
        super()._give_up()
        self._running = False
        for unit in self.units:
            unit.waiting, unit.visits = None, []
            self._free(unit)

    # --- forward ---------------------------------------------------------------------------------------------------
    def _before_forward(self, unit, args, kwargs):
        self._check_frozen(unit)
        if not _in_backward():
            self._free_the_passed(unit)
        self._gather(unit)
        if unit.waiting is not None:  # recomputed in its own backward (a checkpoint around it): that one minds it
            return None
        if not _in_backward():  # else it is computed again, by a checkpoint
            self._ahead(unit, 1)
        unit.visit = Visit()
        return self._watch_inputs(unit, args, kwargs) if torch.is_grad_enabled() else None

    def _watch_inputs(self, unit, args, kwargs):
        """The unit's backward is over when its inputs have their gradients too: its own may be there before, while weights that
        are frozen or detached are still needed. Each input is seen through a view, whose gradient is this forward's alone.
        """
        visit = unit.visit

        def came(_):
            visit.left -= 1
            self._settle(unit)

        def through(x):
            if not (isinstance(x, torch.Tensor) and x.requires_grad):
                return x
            visit.inputs += 1
            x = x.view_as(x)
            x.register_hook(came)
            return x

        return tree_map(through, (args, kwargs))

    def _after_forward(self, unit, out):
        if unit.waiting is not None:
            return
        self._free(unit)
        if torch.is_grad_enabled():
            leaves = tree_leaves(out)
            for x in leaves:
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    x.register_hook(lambda _, visit=unit.visit: self._before_backward(unit, visit))
            strange = [x for x in leaves if not (x is None or isinstance(x, (torch.Tensor, bool, int, float, complex, str)))]
            if strange and unit.owed:
                raise ValueError(
                    f"{unit.name} returns a {type(strange[0]).__name__}, and the tensors in it cannot be seen, so its parameters "
                    "would not be here in backward; a unit returns tensors, alone or in tuples, lists and dicts"
                )

    def _check_frozen(self, unit):
        for flat in unit.flats:
            if not flat.trained:
                for name, p in zip(flat.names, flat.params, strict=True):
                    if p.requires_grad:
                        raise ValueError(f"{name} was frozen when Zero3 was made; it would never be stepped: make a new one")

    # --- backward --------------------------------------------------------------------------------------------------
    def _before_backward(self, unit, visit=None):
        if torch.is_grad_enabled():
            raise ValueError("create_graph=True: gradients of gradients need parameters that stage 3 has given back; use stage 2")
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if unit.waiting is None:
            unit.waiting, unit.visits = set(unit.owed), []
            self._free_the_passed(unit)
            self._gather(unit)
            if unit is self._root:
                self._ahead(unit, len(self.units) - 1)
            elif self.prefetch == "early" or not unit.owed:  # without gradients it has no second unit yet
                self._ahead(unit, -1)
        if visit is not None and visit not in unit.visits:
            visit.left = visit.inputs
            unit.visits.append(visit)

    def _arrived(self, unit, which):
        if unit.waiting is None:  # used outside of its forward, inside `gathered`
            self._before_backward(unit)
        unit.waiting.discard(which)
        self._settle(unit)

    def _settle(self, unit):
        if unit.waiting is not None and not unit.waiting and all(visit.left <= 0 for visit in unit.visits):
            self._after_backward(unit)

    def _after_backward(self, unit):
        """All of its gradients are there: give the parameters back, then sum the gradients into the shards."""
        self._free(unit)
        if unit.owed:
            while self._flying:
                self._land()
            for flat in unit.flats:
                if flat.trained:
                    self._launch(flat)
        unit.waiting, unit.visits = None, []
        if self._running and unit is not self._root:  # "early" has asked before
            self._ahead(unit, -1)

    def _finish(self):
        """Backward is over. A unit with a parameter or an input that had no gradient is still here."""
        self._running = False
        for unit in reversed(self.units):
            if unit.waiting is not None:
                self._after_backward(unit)
        while self._flying:
            self._land()
        for unit in self.units:
            self._free(unit)

    def reduce(self):
        """Nothing is left to do: backward has done it."""
        self._check_over(self._running)
