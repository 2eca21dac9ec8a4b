"""Judges the first half of lab 2: averaged gradients and a loss over tokens, beside one device in float64.

Ranks compute on a small net, some with a layer less, some without rows; the same net goes through the same rows here, and what
each rank adds is weighed as this class's lab 1 does.

    g = (sum over ranks of w_r g_r) / (sum of w_r)          error <= 1e-11 (1 + max |g|)

Reference: Goldberg 1991, "What every computer scientist should know about floating-point arithmetic", for the bound.
"""

import torch

from ..nn.optim import Adam
from . import carry
from .arrivals import must_use
from .drivers_data import EPS, LR, Net
from .expect import Wrong, close, draw, expect, tensor
from .problem import Session

__all__ = [
    "adam_steps",
    "few_and_many",
    "gradients",
    "handed",
    "layers",
    "layout",
    "mean_of",
    "names_of",
    "same_gradients",
    "special_models",
    "token_arrivals",
    "token_cost",
    "uneven_tokens",
]

CLOSE = 1e-11  # float64, some hundred terms
WIDTH, ROWS = 4, 3


# --- inputs and oracles -------------------------------------------------------------------------------------------------
def layout(s: Session) -> dict:
    """The part of the twist that the collectives need."""
    return {key: s.twist[key] for key in ("step", "offset", "odd", "weighted")}


def layers(s: Session, count: int, width: int):
    """Weights and biases of a net."""
    return [(draw(s, width, width) / width**0.5, draw(s, width)) for _ in range(count)]


def mean_of(s: Session, by_rank, trained):
    """The gradients by parameter of several ranks (None: no gradient) as this class's mean; None where it is not trained."""
    n, found = len(by_rank), []
    for k, wanted in enumerate(trained):
        parts = [carry.weight(s.twist, r) * grads[k] for r, grads in enumerate(by_rank) if grads[k] is not None]
        found.append(sum(parts) / carry.votes(s.twist, n) if wanted else None)
    return found


def same_gradients(found, exact, who: str, names) -> None:
    """Wrong unless these gradients are those of one device; the hint names a factor if there is one."""
    expect(isinstance(found, (list, tuple)) and len(found) == len(exact), f"{who}: no gradients came back")
    for got, wanted, name in zip(found, exact, names, strict=True):
        if wanted is None:
            expect(got is None, f"{who}: the frozen {name} has a gradient", "who is trained?")
            continue
        expect(got is not None, f"{who}: {name} has no gradient", "who needs the mean, if another rank has a gradient?")
        tensor(got, wanted.shape, torch.float64, f"{who}: the gradient of {name}")
    pairs = [(g, w, name) for g, w, name in zip(found, exact, names, strict=True) if w is not None]
    for got, wanted, name in pairs:
        bound = CLOSE * (1 + wanted.abs().max())
        close(got, wanted, bound, f"{who}: the gradient of {name}", _factor([p[:2] for p in pairs]))


def _factor(pairs) -> str:
    got, exact = (torch.cat([p[k].reshape(-1) for p in pairs]) for k in (0, 1))
    ratio = (got * exact).sum() / (exact * exact).sum()
    if bool((got - ratio * exact).abs().max() <= 1e-9):
        return f"all gradients are {ratio:.3f} times one device's: which number here is that?"
    return "no factor mends it: whose share is wrong?"


def names_of(count: int):
    """Words for the parameters of a net with `count` layers."""
    return [f"{kind} {k}" for k in range(count) for kind in ("weight", "bias")]


# --- average_grads ------------------------------------------------------------------------------------------------------
def _average(s: Session, n, *, count=2, steps=1, frozen=(), uses=None, idle=(), root=None):
    """(outcome, one device's gradients of the first step, its parameters at the end) of `averaged` on n ranks."""
    carry.ready(s, "data", layout(s))
    how = layout(s) | ({} if root is None else {"root": root})
    nets, uses = layers(s, count, WIDTH), uses or [list(range(count))] * n
    batches = [[None if r in idle else draw(s, ROWS, WIDTH) for _ in range(steps)] for r in range(n)]
    args = [(batches[r], uses[r]) for r in range(n)]
    outcome = s.run(how, nets, list(frozen), ranks=n, per_rank=args)
    model, first = Net(nets, frozen), None
    params = list(model.parameters())
    adam = Adam([p for p in params if p.requires_grad], lr=LR, eps=EPS)
    for step in range(steps):
        by_rank = []
        for r in range(n):
            adam.zero_grad()
            if batches[r][step] is not None:
                model.loss(batches[r][step], uses[r]).backward()
            by_rank.append([p.grad for p in params])
        mean = mean_of(s, by_rank, [p.requires_grad for p in params])
        for p, grad in zip(params, mean, strict=True):
            p.grad = grad
        first = first or mean
        adam.step()
    return outcome, first, [p.detach() for p in params]


def _compare(outcome, exact, n, count=2):
    for r, value in enumerate(outcome.values):
        same_gradients(value["grads"], exact, f"{n} ranks: rank {r}", names_of(count))


def gradients(s: Session):
    for n in (2, 1, s.dice.choice((3, 5, 6, 7, 8))):
        outcome, exact, _ = _average(s, n)
        _compare(outcome, exact, n)
    return carry.words(s)


def special_models(s: Session):
    lazy = s.dice.randrange(3)  # uses one layer less
    uses = [[0, 1, 0] if r == lazy else [0, 2, 1, 0] for r in range(3)]
    outcome, exact, _ = _average(s, 3, count=3, frozen=(2,), uses=uses, idle=((lazy + 1) % 3,))
    _compare(outcome, exact, 3, 3)


def adam_steps(s: Session):
    n = 3
    outcome, _, exact = _average(s, n, steps=5)
    for r, value in enumerate(outcome.values):
        for got, wanted, name in zip(value["params"], exact, names_of(2), strict=True):
            close(tensor(got, wanted.shape, torch.float64, name), wanted, 1e-9, f"{n} ranks: rank {r}: {name} after five steps")
        same = all(torch.equal(a, b) for a, b in zip(value["params"], outcome.values[0]["params"], strict=True))
        expect(same, f"{n} ranks: rank {r} ends with other bits than rank 0", "one model, or several?")


def handed(s: Session):
    n = 3
    root = s.dice.randrange(n)
    outcome, exact, _ = _average(s, n, root=root)
    _compare(outcome, exact, n)
    astray = carry.off_the_way(outcome.trace, root)
    expect(not astray, f"{n} ranks: {astray}", "this time another all_reduce was handed in, which sends nothing there")
    wanted, sent = 2 * (n - 1) * 2 * (WIDTH * WIDTH + WIDTH) * 8, outcome.trace.bytes_sent()
    expect(sent == wanted, f"{n} ranks: {sent:,} bytes in all, target {wanted:,}", "what must be summed, and how often?")


# --- token_loss ---------------------------------------------------------------------------------------------------------
def _counted(s: Session, counts):
    """Run token_loss on len(counts) ranks; compare the mean of gradients and values with one device."""
    carry.ready(s, "data", layout(s))
    n, w = len(counts), draw(s, 5)
    rows = [{"x": draw(s, min(c, 6), 5), "tokens": c} for c in counts]
    outcome = s.run(layout(s), w, ranks=n, per_rank=[(row,) for row in rows])
    leaf = w.clone().requires_grad_()
    sums = [(row["x"] @ leaf).square().sum() for row in rows]
    shares = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in sums]
    weights, votes = [carry.weight(s.twist, r) for r in range(n)], carry.votes(s.twist, n)
    total = max(1, sum(v * c for v, c in zip(weights, counts, strict=True)))
    where = f"{n} ranks, tokens {', '.join(f'{c:,}' for c in counts)}"

    def mean(values):
        return sum(v * x for v, x in zip(weights, values, strict=True)) / votes

    for r, value in enumerate(outcome.values):
        tensor(value["grad"], (5,), torch.float64, f"{where}: rank {r}: the gradient")
        expect(isinstance(value["loss"], torch.Tensor) and value["loss"].numel() == 1, f"{where}: rank {r} returned no scalar")
        finite = bool(value["grad"].isfinite().all() and value["loss"].isfinite().all())
        expect(finite, f"{where}: rank {r} has nan or inf", "what is divided by what there?")
    exact = mean(shares) * votes / total
    got = mean([value["grad"] for value in outcome.values])
    if bool((got - exact).abs().max() > CLOSE * exact.abs().max()):  # relative: with many tokens all of it is small
        hint = _who_counts(mean, got, exact, shares, counts)
        raise Wrong(f"{where}: the mean of the ranks' gradients is not one device's", hint)
    loss = mean([value["loss"].reshape(()).double() for value in outcome.values])
    one = float(mean([x.detach() for x in sums]) * votes / total)
    near = abs(float(loss) - one) <= CLOSE * abs(one)
    expect(near, f"{where}: the mean of what you return is not the loss of all tokens")
    return outcome


def _who_counts(mean, got, exact, shares, counts) -> str:
    if all(counts):
        means = mean([g / c for g, c in zip(shares, counts, strict=True)])
        if bool((got - means).abs().max() <= 1e-9 * means.abs().max()):
            return f"the error follows tokens per rank: how much does one of {min(counts)} weigh beside one of {max(counts)}?"
    ratio = (got * exact).sum() / (exact * exact).sum()
    if bool((got - ratio * exact).abs().max() <= 1e-9 * exact.abs().max()):
        return f"it is {ratio:.9g} times one device's: who divides by what, and how often?"
    return "whose tokens count how much?"


def uneven_tokens(s: Session):
    for n in (2, s.dice.choice((3, 4)), 1):
        counts = [1 + 5 * r + s.dice.randrange(3) for r in range(n)]
        s.dice.shuffle(counts)
        s.remembered[n, "tokens"] = _counted(s, counts)
    return carry.words(s)


def few_and_many(s: Session):
    _counted(s, [4, 0, 2])
    _counted(s, [0, 0])
    _counted(s, [2**24 + 1, 2])  # more than float32 can count


def token_arrivals(s: Session):
    """The tokens of others are known from messages alone: altered, they give another gradient."""
    n, w = 3, draw(s, 5)
    rows = [{"x": draw(s, c, 5), "tokens": c} for c in s.dice.sample(range(2, 7), n)]
    votes = carry.votes(s.twist, n)
    scale = votes / sum(carry.weight(s.twist, r) * row["tokens"] for r, row in enumerate(rows))
    exact = [2 * scale * row["x"].T @ (row["x"] @ w) for row in rows]

    def right(r, value):
        return bool(((value["grad"] - exact[r]).abs() <= CLOSE * exact[r].abs().max()).all())

    must_use(s, right, layout(s), w, ranks=n, per_rank=[(row,) for row in rows])


def token_cost(s: Session):
    found = {key[0]: outcome for key, outcome in s.remembered.items() if isinstance(key, tuple) and key[1] == "tokens"}
    n, outcome = max(found.items()) if found else (2, _counted(s, [3, 1]))
    wanted, sent = 2 * (n - 1) * 8, outcome.trace.bytes_sent()
    expect(sent <= wanted, f"{n} ranks: {sent} bytes in all, target {wanted}", "which one number do all ranks need?")
