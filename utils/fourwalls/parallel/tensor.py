"""Tensor parallelism: the ranks share each matrix product, two products at a time, so that they meet once for both.

The first matrix is cut by columns (its outputs), so each rank gets a slice of the hidden numbers and the nonlinearity needs no
one else; the second is cut by rows (its inputs), so each rank gets a part of the sum, and one all-reduce finishes it. Its mirror
image in backward is the all-reduce of the input's gradient. Entrance and exit belong together and are one object, a `Region`,
so that another arrangement between the regions (sequence.py) needs no other layers.

    Y = f(X [A_1 .. A_t]) [B_1; ..; B_t] = sum over r of f(X A_r) B_r        forward: 1 all-reduce, backward: 1 all-reduce

Reference: Shoeybi et al. 2019 (arXiv:1909.08053), section 3 (its f is `enter`, its g is `leave`).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..collectives import autograd, ring
from ..nn.layers import GELU
from ..ranks.comm import Comm
from .tensor_shards import Cut, check_share, fill_shard

__all__ = ["ColumnLinear", "Region", "RowLinear", "TensorFeedForward"]


class Region:
    """How activations enter and leave the part that ranks share, when all ranks hold all of them in between.

    enter: nothing forward, one all-reduce backward.  leave: one all-reduce forward, nothing backward.
    `all_reduce(comm, x)`: the one to use, for instance your own ring. Each moves s b h numbers.
    """

    split_dim: int | None = None  # the dim along which activations are cut between regions

    def __init__(self, comm: Comm, *, all_reduce: Callable = ring.all_reduce):
        self.comm, self.all_reduce = comm, all_reduce

    def enter(self, x: torch.Tensor, layers: Sequence) -> list[torch.Tensor]:
        """x (b, s, h) whole, the same on all ranks -> x W^T + bias of each layer's shard, (b, s, outputs/t). One entrance for
        all layers, hence one all-reduce of their summed gradients.
        """
        x = autograd.copy_to(self.comm, x, all_reduce=self.all_reduce)
        return [F.linear(x, layer.weight, layer.bias) for layer in layers]

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """(b, s, h), each rank's part of a sum -> the sum, on all ranks."""
        return autograd.reduce_from(self.comm, partial, all_reduce=self.all_reduce)

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The rows of `x` along `dim`, which is the sequence, that this rank works on between regions: here all."""
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Activations between regions, whole on every rank: for looking, not for training."""
        return x

    def check_length(self, length: int) -> None:
        """ValueError for a sequence that this arrangement cannot take: here none."""

    def sum_gradients(self, model: nn.Module) -> None:
        """After backward: finish the gradients of parameters that every rank holds. Here they are finished."""


class _Shard(nn.Module):
    """A linear layer of which this rank holds a part: it starts as that part of the whole layer does."""

    @torch.no_grad()
    def init_parameters(self, name: str = "linear", seed: int = 0) -> None:
        fill_shard(self.weight, self.cuts["weight"], self.comm, f"{name}.weight", seed=seed, std=self.std)
        if self.bias is not None:
            self.bias.zero_()


class ColumnLinear(_Shard):
    """y = x W^T + bias, W cut along its outputs. weight (outputs/t, inputs), bias (outputs/t,).

    x (..., inputs), whole -> (..., outputs/t); with gather_output (..., outputs) on all ranks, by one more all-gather. Starts
    as `nn.Linear` of the same name and seed. ValueError where t does not divide outputs.
    """

    def __init__(
        self,
        comm: Comm,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        std: float = 0.02,
        gather_output: bool = False,
        region: Region | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.comm, self.region, self.gather_output, self.std = comm, region or Region(comm), gather_output, std
        self.inputs, self.outputs, width = inputs, outputs, check_share("outputs", outputs, comm.size)
        self.weight = nn.Parameter(torch.empty(width, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if bias else None
        self.cuts = {"weight": Cut(0, outputs), "bias": Cut(0, outputs)}
        self.init_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.region.enter(x, [self])
        return autograd.gather_from(self.comm, y, -1, self.outputs) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs} in {self.comm.size} columns, bias={self.bias is not None}"


class RowLinear(_Shard):
    """y = x W^T + bias, W cut along its inputs. weight (outputs, inputs/t), bias (outputs,) whole on every rank.

    x (..., inputs/t) -> (..., outputs) as `region.leave` gives it; with split_input x is whole and each rank takes its columns.
    The bias is added once, after the sum; so every rank holds it and sees its whole gradient. ValueError where t does not divide
    inputs.
    """

    def __init__(
        self,
        comm: Comm,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        std: float = 0.02,
        split_input: bool = False,
        region: Region | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.comm, self.region, self.split_input, self.std = comm, region or Region(comm), split_input, std
        self.inputs, self.outputs, width = inputs, outputs, check_share("inputs", inputs, comm.size)
        self.weight = nn.Parameter(torch.empty(outputs, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None
        self.cuts = {"weight": Cut(1, inputs)}
        self.init_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split_input:
            x = autograd.scatter_to(self.comm, x, -1)
        y = self.region.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.inputs} in {self.comm.size} rows, {self.outputs}, bias={self.bias is not None}"


class TensorFeedForward(nn.Module):
    """`nn.gpt.FeedForward` on t ranks: up by columns, GELU, down by rows. (b, s, h) -> (b, s, h). One all-reduce each way."""

    def __init__(
        self,
        comm: Comm,
        width: int,
        ff: int,
        *,
        bias=True,
        std=0.02,
        out_std=0.02,
        region: Region | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        kinds = {"bias": bias, "region": region or Region(comm), "device": device, "dtype": dtype}
        check_share("ff", ff, comm.size)
        self.up = ColumnLinear(comm, width, ff, std=std, **kinds)
        self.activation = GELU("tanh")
        self.down = RowLinear(comm, ff, width, std=out_std, **kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))
