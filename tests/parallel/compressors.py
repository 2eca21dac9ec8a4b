"""What the tests of compressed all-reduces share: the schemes, gradients, and how far off one message may be."""

import torch

import fourwalls as fw
from fourwalls.cost.hardware import uniform
from fourwalls.parallel.compress import Bfloat16, Int8, LowRank, TopK

NETWORK = uniform(1e-6, 1e9)
U16 = 2.0**-8  # half the distance of two bfloat16 near 1
MAKERS = {
    "bfloat16": Bfloat16,
    "int8": Int8,
    "int8 blocks": lambda **o: Int8(block=16, **o),
    "int8 wide": lambda **o: Int8(wide=True, **o),
    "top-k": lambda **o: TopK(k=5, **o),
    "top-k all": lambda **o: TopK(ratio=1.0, **o),
    "low rank": lambda **o: LowRank(rank=2, **o),
}


def gradient(rank, shape, dtype=torch.float32, step=0, scale=True):
    """Different on every rank, in size too, so that an own scale is a wrong one."""
    generator = torch.Generator().manual_seed(101 * rank + step)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * (3.0**rank if scale else 1.0)).to(dtype)


def once(comm, make, shape, dtype=torch.float32, op="sum", **options):
    x = gradient(comm.rank, shape, dtype)
    before = x.clone()
    total = make(**options)(comm, x, op=op)
    assert torch.equal(x, before), "the gradient was changed"
    return total


def kept_by_top_k(x, k):
    """What top-k keeps of one tensor, by sorting: the oracle."""
    flat = x.reshape(-1).double()
    keep = flat.abs().argsort(descending=True, stable=True)[:k]
    return torch.zeros_like(flat).index_copy(0, keep, flat[keep]).view(x.shape)


def allowed(make, inputs, op="sum"):
    """(exact, bound) for one message without a history, from the dtype of the wire and the number of terms."""
    scheme, n = make(), len(inputs)
    wide = [x.double() for x in inputs]
    if isinstance(scheme, TopK):
        wide = [kept_by_top_k(x, scheme.count(x.numel())) for x in inputs]
    exact, size = sum(wide), sum(x.abs() for x in wide)
    bound = ((1 + 2.0**-24) ** (n + 3) - 1) * size  # float32 additions, and a division where the mean is wanted
    if isinstance(scheme, Bfloat16):
        bound = bound + ((1 + U16) ** n - 1) * size  # each is rounded once, each addition rounds
    if isinstance(scheme, Int8):
        flat = torch.stack([x.reshape(-1) for x in wide])
        width = scheme.block or flat.shape[1]
        scales = [part.abs().max().expand(part.shape[1]) for part in flat.split(width, 1)]
        bound = bound + (n / (2 * scheme.levels(n)) * (1 + 1e-5) * torch.cat(scales)).view(exact.shape)
    return (exact / n, bound / n) if op == "avg" else (exact, bound)


def train(comm, make, steps, shape=(12, 10), constant=True, **options):
    """Sums over all steps of what came out and what went in, and the residual's norm after each step."""
    scheme = make(**options)
    out, into, owed = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), []
    for step in range(steps):
        g = gradient(comm.rank, shape, torch.float64, step=0 if constant else step, scale=False)
        into += g
        out += scheme(comm, g)
        owed.append(float(scheme.residual().norm()) if scheme.residual() is not None else 0.0)
    return out, into, owed, scheme.residual()


def drift(make, steps, n=3, **options):
    """(largest element by which the outputs' sum is off the inputs', the norms owed on rank 0)."""
    values = fw.simulate(train, make, steps, ranks=n, cluster=NETWORK, **options).values
    off = values[0][0] - sum(v[1] for v in values)
    return float(off.abs().max()), values[0][2], off + sum(v[3].view_as(off) if v[3] is not None else 0 for v in values)
