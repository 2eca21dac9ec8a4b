"""What each collective asks first: does everybody make this call?

With checks on, every collective states what it is about to do, and the communicator compares the statements of all ranks before
data moves (`ranks/agreement.py` says how). With checks off the question costs one `if`.

    statement  =  (collective, algorithm, op or root, dtype, shape, ...)

Reference: the MPI standard, chapter "Collective Communication", on matching calls.
"""

import torch

from ..ranks.comm import Comm

__all__ = ["agree", "agree_gather", "check_root"]


def agree(comm: Comm, collective: str, x: torch.Tensor | None = None, **arguments) -> None:
    """With checks on: raise MismatchError unless all ranks call `collective` with these arguments and an `x` of this shape and
    dtype.
    """
    if not comm.checks or comm.size == 1:
        return
    if x is not None:
        comm._check_tensor(x, collective)
        arguments["dtype"] = str(x.dtype).removeprefix("torch.")
        arguments["shape"] = tuple(x.shape)
    comm.agree((("collective", collective), *arguments.items()))


def agree_gather(comm: Comm, collective: str, x: torch.Tensor, numel: int | None, **arguments) -> None:
    """`agree` for gathers: with `numel` the ranks' shapes rightly differ, and only dtype and total must be the same."""
    if numel is None:
        agree(comm, collective, x, **arguments)
    else:
        agree(comm, collective, dtype=str(x.dtype).removeprefix("torch."), numel=numel, **arguments)


def check_root(comm: Comm, root: int) -> None:
    """Raise ValueError unless `root` is a rank of this communicator."""
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < comm.size:
        near = f"; use int({root!r})" if hasattr(root, "__index__") and not isinstance(root, (int, bool)) else ""
        raise ValueError(f"rank {comm.rank}: root is {root!r}; ranks are 0 to {comm.size - 1}{near}")
