"""How much faster will a smaller model be? The products that are left, counted from the tensors themselves.

A pruned block is no `Shape` any more (its heads no longer fill its width), so the sizes are read from its layers. For a model
that nobody pruned the list is that of `cost.flops`, line by line. A mask changes no size, hence predicts no speed.

    speed-up = FLOPs before / FLOPs after

Reference: Narayanan et al. 2021 (arXiv:2104.04473) for the count, as in `cost.flops`.
"""

from ...cost.flops import Op
from ...nn.gpt import GPT, Block

__all__ = ["block_ops", "model_flops", "predicted_speedup"]


def block_ops(block: Block, batch: int, length: int) -> list[Op]:
    """The matrix products of one block for `batch` sequences of `length` tokens; names as in `cost.flops.layer_ops`."""
    a, m = block.attention, block.mlp
    rows, asked = batch * length, a.query.outputs
    square = 2 * batch * length * length * asked  # scores of a' heads of width d: a' d = rows of query

    def product(name: str, formula: str, *layers) -> Op:
        return Op(name, formula, sum(2 * rows * layer.inputs * layer.outputs for layer in layers))

    return [
        product("query, key, value", "2 b s h (h' + 2 kv')", a.query, a.key, a.value),
        Op("scores", "2 b s^2 h'", square),
        Op("weighted values", "2 b s^2 h'", square),
        product("attention output", "2 b s h' h", a.output),
        product("MLP up", "2 b s h f'", m.up),
        product("MLP down", "2 b s f' h", m.down),
    ]


def model_flops(model: GPT, batch: int, length: int) -> int:
    """FLOPs of one forward pass: all blocks and the output head."""
    blocks = sum(op.forward for block in model.blocks for op in block_ops(block, batch, length))
    return blocks + 2 * batch * length * model.config.width * model.config.vocabulary


def predicted_speedup(before: GPT, after: GPT, batch: int, length: int) -> float:
    """FLOPs of a forward pass before / after: what time would do if products were all there is and all ran at one pace."""
    return model_flops(before, batch, length) / model_flops(after, batch, length)
