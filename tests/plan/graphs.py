"""Small random graphs for the tests of plans."""

import math
import random

from fourwalls.cost.hardware import Device, uniform
from fourwalls.plan.layouts import ALIKE, Prices, split
from fourwalls.plan.operators import Graph, legal_signatures

POINTWISE = ("gelu", "square", "softmax", "layer_norm", "add_bias", "scale")


def prices(rng: random.Random, n: int) -> Prices:
    """A wire and a device of random speed, so that sometimes the one and sometimes the other rules."""
    device = Device("toy", {"float32": 10 ** rng.uniform(6, 9)}, 10**9, 10 ** rng.uniform(7, 10))
    return Prices(n, uniform(10 ** rng.uniform(-7, -5), 10 ** rng.uniform(6, 10), device))


def random_graph(rng: random.Random, n: int, *, most: int = 500) -> Graph:
    """One to four operators, chains, forks and joins, of which no more than `most` plans can be made."""
    while True:
        graph = _draw(rng, n)
        plans = math.prod(len(graph.layouts_of(s, n)) for s in graph.sources.values())
        plans *= math.prod(len(legal_signatures(op, n)) for op in graph.ops)
        if plans <= most:
            return graph


def _draw(rng: random.Random, n: int) -> Graph:
    graph, sizes = Graph(itemsize=8), (2, 3, 4, 6)
    if rng.random() < 0.15:
        ids = graph.input("ids", (rng.choice(sizes),), ids=True)
        pool = [graph.op("embedding", ids, graph.weight("table", (rng.choice(sizes), rng.choice(sizes))))]
    else:
        layout = rng.choice([None, ALIKE, split(0)])
        rows = rng.choice((n, 2 * n) if layout == split(0) else sizes)
        pool = [graph.input("x", (rows, rng.choice(sizes)), needs_grad=rng.random() < 0.6, layout=layout)]
    for k in range(rng.randint(1, 4)):
        x = rng.choice(pool)
        kind = rng.choice(("matmul", "matmul", "add", "permute", "split_heads", *POINTWISE))
        if kind == "matmul":
            other = next((t for t in pool if len(t.shape) == len(x.shape) == 2 and t.shape[0] == x.shape[-1]), None)
            if other is None or rng.random() < 0.5:
                other = graph.weight(f"w{k}", (x.shape[-1], rng.choice(sizes)))
            made = graph.op("matmul", x, other)
        elif kind == "add":
            made = graph.op("add", x, rng.choice([t for t in pool if t.shape == x.shape]))
        elif kind == "permute":
            made = graph.op("permute", x, dims=tuple(rng.sample(range(len(x.shape)), len(x.shape))))
        elif kind == "split_heads":
            if x.shape[-1] % 2 or len(x.shape) > 2:
                continue
            made = graph.op("split_heads", x, heads=2)
            if rng.random() < 0.5:
                made = graph.op("merge_heads", made)
        elif kind == "layer_norm":
            made = graph.op(
                "layer_norm", x, graph.weight(f"g{k}", x.shape[-1:]), graph.weight(f"s{k}", x.shape[-1:], layout=ALIKE)
            )
        elif kind == "add_bias":
            made = graph.op("add_bias", x, graph.weight(f"b{k}", x.shape[-1:]))
        else:
            made = graph.op(kind, x, **({"by": 0.5} if kind == "scale" else {}))
        pool.append(made)
    if rng.random() < 0.4:
        graph.op("mean", pool[-1])
    elif rng.random() < 0.2:
        graph.output(pool[-1], None)
    return graph
