"""Graphs to plan for: an MLP, an attention, whole transformer layers, written in the operators of this package.

Sizes as everywhere: b micro-batch, s sequence, h width, a heads, f width of the MLP. Activations are (b, s, h).

    y = x + Attention(Norm(x));  z = y + MLP(Norm(y))

Reference: Radford et al. 2019 (GPT-2).
"""

from .layouts import Layout
from .operators import Graph, Tensor

__all__ = ["attention", "mlp", "transformer"]


def mlp(graph: Graph, x: Tensor, ff: int, *, prefix: str = "") -> Tensor:
    """x (.., h) -> (.., h): up, GELU, down, with biases."""
    h = x.shape[-1]
    up = graph.op("matmul", x, graph.weight(f"{prefix}W1", (h, ff)), name=f"{prefix}up")
    up = graph.op("add_bias", up, graph.weight(f"{prefix}b1", (ff,)), name=f"{prefix}up+bias")
    act = graph.op("gelu", up, name=f"{prefix}gelu")
    down = graph.op("matmul", act, graph.weight(f"{prefix}W2", (ff, h)), name=f"{prefix}down")
    return graph.op("add_bias", down, graph.weight(f"{prefix}b2", (h,)), name=f"{prefix}down+bias")


def attention(graph: Graph, x: Tensor, heads: int, *, prefix: str = "") -> Tensor:
    """x (b, s, h) -> (b, s, h): every token looks at every token (no mask: it changes no layout)."""
    h, parts = x.shape[-1], {}
    for word in ("query", "key", "value"):
        flat = graph.op("matmul", x, graph.weight(f"{prefix}W_{word}", (h, h)), name=f"{prefix}{word}")
        apart = graph.op("split_heads", flat, heads=heads, name=f"{prefix}{word} heads")
        dims = (0, 2, 3, 1) if word == "key" else (0, 2, 1, 3)  # (b, a, s, h/a), keys (b, a, h/a, s)
        parts[word] = graph.op("permute", apart, dims=dims, name=f"{prefix}{word} turned")
    scores = graph.op("matmul", parts["query"], parts["key"], name=f"{prefix}scores")
    scaled = graph.op("scale", scores, by=(h // heads) ** -0.5, name=f"{prefix}scaled")
    weights = graph.op("softmax", scaled, name=f"{prefix}softmax")
    mixed = graph.op("matmul", weights, parts["value"], name=f"{prefix}mixed")
    turned = graph.op("permute", mixed, dims=(0, 2, 1, 3), name=f"{prefix}mixed turned")
    joined = graph.op("merge_heads", turned, name=f"{prefix}joined")
    out = graph.op("matmul", joined, graph.weight(f"{prefix}W_out", (h, h)), name=f"{prefix}out")
    return graph.op("add_bias", out, graph.weight(f"{prefix}b_out", (h,)), name=f"{prefix}out+bias")


def transformer(
    layers: int,
    *,
    batch: int,
    length: int,
    width: int,
    heads: int,
    ff: int | None = None,
    layout: Layout | None = None,
    itemsize: int = 2,
) -> Graph:
    """`layers` layers behind each other. layout: that of the first input and of the last output; None: the input as the plan
    likes, and a loss, the mean of the squared output."""
    graph = Graph(itemsize=itemsize)
    x = graph.input("x", (batch, length, width), needs_grad=True, layout=layout)
    for k in range(layers):
        for part in ("attention", "mlp"):
            p = f"{k}." if layers > 1 else ""
            gain, shift = graph.weight(f"{p}{part} gain", (width,)), graph.weight(f"{p}{part} shift", (width,))
            normed = graph.op("layer_norm", x, gain, shift, name=f"{p}{part} norm")
            attend = part == "attention"
            made = attention(graph, normed, heads, prefix=p) if attend else mlp(graph, normed, ff or 4 * width, prefix=p)
            x = graph.op("add", x, made, name=f"{p}{part} added")
    if layout is None:
        graph.op("mean", graph.op("square", x, name="squares"), name="loss")
    else:
        graph.output(x, layout)
    return graph
