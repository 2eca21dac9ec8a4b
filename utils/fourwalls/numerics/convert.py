"""Quantise a whole model: every linear layer (and convolution) is replaced, and calibration watches what goes into each.

`convert` walks a copy of the model and puts `make(layer)` in the place of each linear layer. Norms, embeddings, the loss and a
head that shares the token table stay in floats: they are few numbers, and the last rounding before the loss is the dearest. A
convolution is a linear layer over patches, so it is unfolded and goes the same way.

    conv(x)[b, :, place] = W.flatten(1) @ patch(b, place)

Reference: Nagel et al. 2021 (arXiv:2106.08295), section 3.
"""

import copy
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from ..nn.layers import Linear
from .int8 import FakeLinear, Int8Linear

__all__ = ["LINEARS", "UnfoldedConv", "convert", "linear_names", "replace_layers", "watch_inputs"]

LINEARS = (Linear, nn.Linear)


class UnfoldedConv(nn.Module):
    """A convolution as a product over patches, by any linear layer: (b, c, y, x) -> (b, outputs, y', x')."""

    def __init__(self, conv: nn.Conv2d, make: Callable[[nn.Module], nn.Module]):
        super().__init__()
        if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError("this convolution has groups or a padding other than zeros; allowed: one group, zeros, numbers")
        kinds = {"bias": conv.bias is not None, "device": conv.weight.device, "dtype": conv.weight.dtype}
        flat = nn.Linear(conv.weight[0].numel(), conv.out_channels, **kinds)
        with torch.no_grad():
            flat.weight.copy_(conv.weight.flatten(1))
            if conv.bias is not None:
                flat.bias.copy_(conv.bias)
        self.linear = make(flat)
        self.window = {"dilation": conv.dilation, "padding": conv.padding, "stride": conv.stride}
        self.kernel = conv.kernel_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(x, self.kernel, **self.window).transpose(1, 2)  # (b, places, c * ky * kx)
        y = self.linear(patches).transpose(1, 2)
        return y.unflatten(2, [self._places(d, x.shape[2 + d]) for d in (0, 1)])

    def _places(self, d: int, size: int) -> int:
        reach = self.window["dilation"][d] * (self.kernel[d] - 1) + 1
        return (size + 2 * self.window["padding"][d] - reach) // self.window["stride"][d] + 1


def linear_names(model: nn.Module, *, kinds=LINEARS) -> list[str]:
    """The paths of the model's linear layers, in order; "" for a model that is one. A layer that stands in several places has the
    path of the first.
    """
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def replace_layers(model: nn.Module, made: Mapping[str, nn.Module]) -> nn.Module:
    """In place: {path: module} put where the layer of that path stands, in every place where the same layer stands, so that what
    was shared stays shared. Returns the model, or the new module itself for the path "".
    """
    new = {id(model.get_submodule(name)): module for name, module in made.items()}
    for home in list(model.modules()):
        for name, child in list(home._modules.items()):
            if id(child) in new:
                home._modules[name] = new[id(child)]
    return made.get("", model)


def convert(model: nn.Module, make: Callable[..., nn.Module] = Int8Linear.of, *, skip: Iterable[str] = (), named: bool = False):
    """A copy of the model in which each linear layer and convolution is `make(layer)`; `named`: make(layer, its path).

    skip: paths to leave alone. ValueError for a path that does not exist, for a model without linear layers, and for one that is
    quantised already.
    """
    if any(isinstance(m, (Int8Linear, FakeLinear)) for m in model.modules()):
        raise ValueError("this model is quantised already; quantise the float model that it came from")
    names, skip = linear_names(model, kinds=(*LINEARS, nn.Conv2d)), set(skip)
    unknown = sorted(skip - set(names))
    if unknown or not names:
        found = f"no linear layer {unknown[0]!r}; there are {', '.join(names)}" if unknown else "the model has no linear layer"
        raise ValueError(found)
    result, made = copy.deepcopy(model), {}
    for name in names:
        if name in skip:
            continue
        layer = result.get_submodule(name)

        def build(flat, name=name):
            return make(flat, name) if named else make(flat)

        made[name] = UnfoldedConv(layer, build) if isinstance(layer, nn.Conv2d) else build(layer)
    return replace_layers(result, made).eval()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


@torch.no_grad()
def watch_inputs(model: nn.Module, batches: Iterable, *, run: Callable | None = None) -> dict[str, torch.Tensor]:
    """{path of a linear layer: its inputs (rows, k)} over calibration batches. run(model, batch), or model(batch).

    ValueError for no batches: scales chosen from nothing are chosen by chance.
    """
    seen: dict[str, list] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, name=name: seen.setdefault(name, []).append(_rows(inputs[0].detach()))
        )
        for name in linear_names(model)
    ]
    training = model.training
    model.eval()
    try:
        for batch in batches:
            run(model, batch) if run else model(batch)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if not seen:
        raise ValueError("no calibration data came to any linear layer; allowed: at least one batch")
    return {name: torch.cat(parts) for name, parts in seen.items()}
