"""How long the exact search for cuts takes, by the number of operators, and what it finds.

Whole transformer layers of a GPT-3 are planned for 8 A100s, their first input and last output whole. The result is right if
Megatron's cuts are found in every layer, and if activations and their gradients send exactly its bytes: between layers the search
may cut the sequence too (a scatter and a gather are an all-reduce), which adds only the sums of the norms' gradients.

    bytes of a rank for activations = 4 x 2 (t - 1)/t x s b h x 2 B, for each layer

Reference: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.
"""

import time
from collections.abc import Callable, Iterator

from ..cost.hardware import get_cluster
from ..cost.shape import get_model
from ..plan.blocks import transformer
from ..plan.choose import choose_layouts
from ..plan.cuts import Plan
from ..plan.layouts import ALIKE, Prices, split
from .record import Row
from .timer import spread

__all__ = ["cut_as_megatron", "describe", "rows"]

describe = "automatic cuts: time of the exact search by the number of operators, and whether it finds Megatron's choice"
LAYERS = (1, 2, 5, 10)
RANKS = 8


def rows(
    options, say: Callable[[str], None] = lambda text: None, *, layers: tuple[int, ...] = LAYERS, model: str = "175B"
) -> Iterator[Row]:
    """Rows for each number of layers: seconds of the search (graph and prices made anew), and the bytes that its plan sends."""
    shape = get_model(model)
    for count in layers:
        say(f"layouts, {count} layers")
        times, plans = [], []
        for _ in range(max(1, min(5, options.pairs))):
            sizes = {"batch": 1, "length": shape.length, "width": shape.width, "heads": shape.heads}
            start = time.perf_counter()
            graph = transformer(count, layout=ALIKE, **sizes)
            plans.append(choose_layouts(graph, Prices(RANKS, get_cluster("a100-selene"))))
            times.append(time.perf_counter() - start)
        plan, numbers = plans[0], shape.length * shape.width
        expected = count * 4 * 2 * (RANKS - 1) * numbers * 2 // RANKS
        moved = [c for c in plan.changes if c.tensor.source != "weight"]
        sent = [sum(c.forward.bytes_sent[r] + c.backward.bytes_sent[r] for c in moved) for r in range(RANKS)]
        right = cut_as_megatron(plan) and sent == [expected] * RANKS and len({p.picoseconds for p in plans}) == 1
        here = {
            "benchmark": "layouts",
            "case": {"operators": len(plan.graph.ops), "layers": count, "ranks": RANKS, "model": model},
            "ok": right,
        }
        middle = spread(times)
        yield Row(metric="time", value=middle.value, unit="s", low=middle.low, high=middle.high, **here)
        yield Row(
            metric="activation_bytes_of_a_rank", value=sent[0], unit="B", peer="formula", source="modelled",
            time_ratio=sent[0] / expected, **here,
        )  # fmt: skip
        yield Row(metric="step", value=plan.seconds, unit="s", source="modelled", **here)


def cut_as_megatron(plan: Plan) -> bool:
    """Whether query, key, value and W1 are cut by columns, W_out and W2 by rows, and the softmax by heads, in every layer."""
    wanted = {"W_query": split(1), "W_key": split(1), "W_value": split(1), "W1": split(1), "W_out": split(0), "W2": split(0)}
    weights = [(name.rpartition(".")[2], layout) for name, layout in plan.layouts.items()]
    heads = [plan.rows[op.name].output for op in plan.graph.ops if op.kind == "softmax"]
    return all(wanted.get(name, layout) == layout for name, layout in weights) and set(heads) == {split(1)}
