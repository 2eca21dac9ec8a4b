"""Collectives from point-to-point messages: one function a collective, several algorithms for each.

Every function takes the communicator first and returns new tensors; inputs are left unchanged unless `out=` says otherwise.
`ALGORITHMS[collective]` lists who can do it: `star` (through one rank), `tree` (binomial), `ring` (segmented),
`ring_blocking` (the shortest form), `halving` (fewest steps), `hierarchical` (inside nodes first), `shared_memory` (one host) and
`pairwise`. All ranks return the same bits. `autograd` holds the forms through which gradients flow.

    all_reduce  =  reduce_scatter, then all_gather  =  reduce, then broadcast

Reference: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", 2007.
"""

from collections.abc import Callable
from difflib import get_close_matches

import torch

from ..ranks.comm import Comm
from . import all_to_all as pairwise
from . import autograd, halving, hierarchical, ring, shared_memory, star, tree
from .all_to_all import all_to_all_unequal
from .reductions import OPS

__all__ = [
    "ALGORITHMS",
    "OPS",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_unequal",
    "autograd",
    "barrier",
    "broadcast",
    "gather",
    "get_algorithm",
    "halving",
    "hierarchical",
    "reduce",
    "reduce_scatter",
    "ring",
    "scatter",
    "shared_memory",
    "star",
    "tree",
]

# the first of each line is what the function of that name uses when none is asked for
ALGORITHMS: dict[str, dict[str, Callable]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "ring_blocking": ring.all_reduce_blocking,
        "tree": tree.all_reduce,
        "star": star.all_reduce,
        "halving": halving.all_reduce,
        "hierarchical": hierarchical.all_reduce,
        "shared_memory": shared_memory.all_reduce,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "tree": tree.reduce_scatter,
        "star": star.reduce_scatter,
        "halving": halving.reduce_scatter,
    },
    "all_gather": {"ring": ring.all_gather, "tree": tree.all_gather, "star": star.all_gather, "halving": halving.all_gather},
    "broadcast": {"tree": tree.broadcast, "ring": ring.broadcast, "star": star.broadcast},
    "reduce": {"tree": tree.reduce, "ring": ring.reduce, "star": star.reduce},
    "scatter": {"tree": tree.scatter, "star": star.scatter},
    "gather": {"tree": tree.gather, "star": star.gather},
    "barrier": {"tree": tree.barrier, "ring": ring.barrier, "star": star.barrier},
    "all_to_all": {"pairwise": pairwise.all_to_all},
}


def get_algorithm(collective: str, algorithm: str | None = None) -> Callable:
    """The function that does `collective` by `algorithm` (None: the usual one). Raises ValueError, which lists those that
    exist, otherwise.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(ALGORITHMS)}")
    known = ALGORITHMS[collective]
    if algorithm is None:
        return next(iter(known.values()))
    if algorithm not in known:
        near = get_close_matches(str(algorithm), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no algorithm {algorithm!r} for {collective}; it can be done by {', '.join(known)}{hint}")
    return known[algorithm]


def all_reduce(
    comm: Comm, x: torch.Tensor, *, op: str = "sum", algorithm: str = "ring", out: torch.Tensor | None = None, **options
) -> torch.Tensor:
    """Every rank returns the reduction of all ranks' `x`, in the shape of `x`. `op` is one of OPS; `options` go to the
    algorithm.
    """
    return get_algorithm("all_reduce", algorithm)(comm, _tensor("all_reduce", x), op=op, out=out, **options)


def reduce_scatter(comm: Comm, x: torch.Tensor, *, op: str = "sum", algorithm: str = "ring", **options) -> torch.Tensor:
    """Rank r returns chunk r of the flattened reduction of all ranks' `x`: flat, about numel/n elements (see `chunks`)."""
    return get_algorithm("reduce_scatter", algorithm)(comm, _tensor("reduce_scatter", x), op=op, **options)


def all_gather(
    comm: Comm,
    x: torch.Tensor,
    *,
    numel: int | None = None,
    algorithm: str = "ring",
    out: torch.Tensor | None = None,
    **options,
) -> torch.Tensor:
    """Every rank returns all ranks' `x`: stacked, (n, *x.shape), where shapes are equal; joined to a flat tensor of `numel`
    elements
    where rank r gives chunk r of it, as `reduce_scatter` returns it."""
    return get_algorithm("all_gather", algorithm)(comm, _tensor("all_gather", x), numel=numel, out=out, **options)


def broadcast(
    comm: Comm, x: torch.Tensor, *, root: int = 0, algorithm: str = "tree", out: torch.Tensor | None = None, **options
) -> torch.Tensor:
    """Every rank returns the `x` of rank `root`. All ranks pass a tensor of that shape and dtype."""
    return get_algorithm("broadcast", algorithm)(comm, _tensor("broadcast", x), root=root, out=out, **options)


def reduce(
    comm: Comm,
    x: torch.Tensor,
    *,
    op: str = "sum",
    root: int = 0,
    algorithm: str = "tree",
    out: torch.Tensor | None = None,
    **options,
) -> torch.Tensor | None:
    """Rank `root` returns the reduction of all ranks' `x`, the others None; nobody's `x` changes."""
    return get_algorithm("reduce", algorithm)(comm, _tensor("reduce", x), op=op, root=root, out=out, **options)


def scatter(comm: Comm, x: torch.Tensor, *, root: int = 0, algorithm: str = "tree", **options) -> torch.Tensor:
    """Rank r returns chunk r of the flattened `x` of rank `root`. The others give its shape and dtype (a meta tensor will do)."""
    return get_algorithm("scatter", algorithm)(comm, _tensor("scatter", x), root=root, **options)


def gather(
    comm: Comm,
    x: torch.Tensor,
    *,
    root: int = 0,
    numel: int | None = None,
    algorithm: str = "tree",
    out: torch.Tensor | None = None,
    **options,
) -> torch.Tensor | None:
    """Rank `root` returns what `all_gather` gives to everybody, the others None."""
    return get_algorithm("gather", algorithm)(comm, _tensor("gather", x), root=root, numel=numel, out=out, **options)


def barrier(comm: Comm, *, algorithm: str = "tree") -> None:
    """Return when every rank has called it."""
    get_algorithm("barrier", algorithm)(comm)


def all_to_all(
    comm: Comm, x: torch.Tensor, *, algorithm: str = "pairwise", out: torch.Tensor | None = None, **options
) -> torch.Tensor:
    """Rank r returns piece r of every rank's `x`, whose rows are n equal pieces; `all_to_all_unequal` takes other counts."""
    return get_algorithm("all_to_all", algorithm)(comm, _tensor("all_to_all", x), out=out, **options)


def _tensor(collective: str, x) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{collective} takes a tensor, not {type(x).__name__}; try torch.as_tensor(x)")
    if x.layout != torch.strided:
        raise ValueError(f"{collective} takes a dense tensor, not {x.layout}; try x.to_dense(), or indices and values apart")
    return x
