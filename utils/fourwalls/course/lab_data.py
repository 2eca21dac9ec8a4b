"""Lab 2, data parallelism: average gradients, a loss over tokens, buckets, and sums that travel while backward goes on.

Gradients are compared with one device's in float64, with layers that are tied, frozen or unused, ranks without rows, and after
five Adam steps; bytes are counted in the Trace, and a drawn all_reduce shows whether messages go through the one that was handed
in. The twist is lab 1's (rank r may count r + 1 times), and the order in which parameters are listed.

    g = (sum over ranks of w_r g_r) / (sum of w_r)          all ranks send 2 (n - 1) S a step

Reference: Li et al. 2020 (arXiv:2006.15704).
"""

import random
from dataclasses import replace

from ..cost.hardware import uniform
from ..viz.timeline import plot_timeline
from . import lab_data_grads as grads
from . import lab_data_overlap as later
from . import lab_ring
from .expect import judged
from .problem import Problem, Spec, Target

__all__ = ["problems", "twist"]

FORBIDDEN = tuple(
    f"fourwalls.{name}"
    for name in ("parallel", "train", "plan", "bench")
    + ("course.lab_data", "course.lab_data_grads", "course.lab_data_overlap", "course.lab_ring")
)
DRIVER = "fourwalls.course.drivers_data."
WIRE = uniform(10e-6, 1e9)


def twist(seed: int | None) -> dict:
    """What this class's ring is like, and the order in which a model lists its parameters."""
    dice = random.Random(f"data {seed}")
    return {**lab_ring.twist(seed), "listed": "forward" if seed is None else dice.choice(("forward", "backward"))}


def problems(seed: int | None = None) -> dict[str, Problem]:
    """The tasks of the lab by the name of the function, in order."""
    t = twist(seed)
    total = "the sum of all ranks' x" if not t["weighted"] else "the sum of (r + 1) times the x of rank r, as in your lab 1"
    mean = "the mean over ranks" if not t["weighted"] else "the mean over ranks in which rank r counts r + 1 times"
    handed = f"all_reduce(comm, x) gives {total}; it is yours, if you kept it."
    listed = "in which forward uses them" if t["listed"] == "forward" else "in which backward makes their gradients"
    made = [
        Problem(
            "data.average_grads",
            Spec(
                "Average the gradients",
                "def average_grads(model, comm, all_reduce):",
                (
                    f"Backward is over on every rank. Make p.grad {mean}, for every parameter that is trained.",
                    handed,
                    "A frozen parameter takes no part. A trained one that has no gradient on some rank counts as zero there, and",
                    "gets the mean too.",
                ),
                minutes=20,
                difficulty=2,
                importance=5,
            ),
            (
                judged("gradients on 1 to 8 ranks", grads.gradients),
                judged("tied, frozen, unused; a rank without rows", grads.special_models),
                judged("five steps of Adam", grads.adam_steps),
                judged("over the all_reduce that was given", grads.handed),
            ),
            5,
            (Target("bytes of all ranks", "2 (n - 1) S", "S: bytes of all trained parameters"),),
            driver=DRIVER + "averaged",
        ),
        Problem(
            "data.token_loss",
            Spec(
                "A loss over tokens, dealt unevenly",
                "def token_loss(loss_sum, tokens, comm, all_reduce):",
                (
                    "loss_sum: the summed loss of this rank's tokens, a scalar with a graph behind it. tokens: their number, 0",
                    "or more. Return the scalar on which this rank then calls backward.",
                    f"Afterwards your average_grads makes {mean}: that must be the gradient of one device's loss, the mean over",
                    "all tokens" + (", where a token of rank r counts r + 1 times." if t["weighted"] else "."),
                    f"In the same way {mean} of what you return is that loss. No tokens anywhere: a loss of 0.",
                    handed,
                ),
                minutes=20,
                difficulty=3,
                importance=5,
            ),
            (
                judged("one device's gradient", grads.uneven_tokens),
                judged("no tokens, and very many", grads.few_and_many),
                judged("cost", grads.token_cost),
                judged("what arrives is used", grads.token_arrivals),
            ),
            4,
            (Target("bytes of all ranks", "2 (n - 1) numbers of 8 bytes"),),
            driver=DRIVER + "counted",
        ),
        Problem(
            "data.fill_buckets",
            Spec(
                "Buckets, in the order in which they fill",
                "def fill_buckets(params, nbytes):",
                (
                    f"params: a list of parameters in the order {listed}. Return a list of lists of them: the",
                    "buckets, in the order in which backward fills them, and so inside each. Frozen ones are in none.",
                    "A bucket holds at most nbytes bytes, or one parameter. No more buckets than that takes.",
                ),
                minutes=20,
                difficulty=2,
                importance=4,
            ),
            (
                judged("every trained parameter once", later.places),
                judged("the order of backward", later.order),
                judged("at most nbytes", later.size),
                judged("as few as can be", later.as_few),
            ),
            4,
            (Target("a bucket", "at most nbytes, or one parameter"),),
            driver=DRIVER + "bucketed",
        ),
        Problem(
            "data.overlap",
            Spec(
                "Send while backward goes on",
                "def overlap(model, comm, buckets, begin, passes):",
                (
                    "Called once, before the first step. buckets: lists of parameters, as fill_buckets gives them.",
                    "begin(x) starts an all_reduce of x beside the program and returns at once; wait() of what it returns gives",
                    "the sum. Sums are carried out one after the other, and every rank must begin them in the same order.",
                    "Each step has `passes` backward passes, whose gradients add up. Begin a bucket's sum in the last of them,",
                    "as soon as its gradients are complete: p.register_post_accumulate_grad_hook(f) calls f(p) then.",
                    f"Return finish(): called after the last backward of a step, it makes p.grad {mean}, for every",
                    "parameter in buckets. A rank may have no gradient of one, or a pass less; there it counts as it is.",
                ),
                minutes=40,
                difficulty=5,
                importance=5,
            ),
            (
                judged("gradients, two steps", later.two_steps),
                judged("tied, frozen, unused; an empty micro-batch", later.special),
                judged("one sum a step", later.one_sum),
                judged("begins before backward ends", later.begins_early),
                judged("backward never waits", later.never_waits),
                judged("exposed", later.exposed),
            ),
            7,
            (
                Target("bytes of all ranks", "2 (n - 1) S a step", "not a pass"),
                Target("waiting during backward", "none"),
                Target("time after backward", "one all_reduce of the last bucket, and 10%"),
            ),
            driver=DRIVER + "overlapped",
            cluster=later.WIRES,
        ),
    ]
    return {p.asked: replace(p, forbidden=FORBIDDEN, cluster=p.cluster or WIRE, twist=t, picture=_picture) for p in made}


def _picture(outcome, ax=None):
    return plot_timeline(outcome.trace, ax=ax, title="your run")
