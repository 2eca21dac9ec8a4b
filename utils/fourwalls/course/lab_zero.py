"""Lab 3, ZeRO: a slice for each rank, a step that keeps state for it alone, gradients handed over, layers borrowed.

Values are compared with one device in float64. State is counted by the judge, since it travels through him from step to step;
gradients and borrowed layers are weighed by the system, from outside. The twist is lab 1's: who owns which chunk, and how often a
rank counts.

    elements all ranks send:   stages 1 and 2:  2 (n - 1) Psi       stage 3:  3 (n - 1) Psi

Reference: Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from dataclasses import replace

from ..cost.hardware import uniform
from ..viz.timeline import plot_timeline
from . import lab_ring
from . import lab_zero_borrow as borrow
from . import lab_zero_checks as checks
from .expect import judged
from .problem import Problem, Spec, Target

__all__ = ["problems", "twist"]

FORBIDDEN = tuple(
    f"fourwalls.{name}"
    for name in ("parallel", "train", "plan", "bench")
    + ("course.lab_zero", "course.lab_zero_borrow", "course.lab_zero_checks", "course.process_memory", "course.lab_ring")
)
DRIVER = "fourwalls.course.drivers_zero."
WIRE = uniform(10e-6, 1e9)


def twist(seed: int | None) -> dict:
    """This class's ring: which chunk a rank ends with, which chunks are longer, and how often a rank counts."""
    return lab_ring.twist(seed)


def problems(seed: int | None = None) -> dict[str, Problem]:
    """The tasks of the lab by the name of the function, in order."""
    t = twist(seed)
    owner = "chunk r" if t["offset"] == 0 else f"chunk (r + {t['offset']}) mod n"
    chunks = f"of lab 1's n chunks rank r has {owner}; where n does not divide, the {t['odd']} ones are one element longer"
    mean = "the mean over ranks" if not t["weighted"] else "the mean over ranks in which rank r counts r + 1 times"
    total = "the sum of all ranks' x" if not t["weighted"] else "the sum of (r + 1) times the x of rank r"
    scatter = f"reduce_scatter(comm, x) gives this rank's slice of {total}, flat."
    gather = "all_gather(comm, part, numel) gives the whole, flat, of everybody's slice."
    made = [
        Problem(
            "zero.my_slice",
            Spec(
                "Which part is mine?",
                "def my_slice(numel, comm):",
                (
                    f"A flat tensor of numel elements: {chunks}.",
                    "Return (start, stop) of this rank's, or slice(start, stop). numel may be less than n, and 0.",
                ),
                minutes=10,
                difficulty=1,
                importance=4,
            ),
            (judged("the chunks of lab 1", checks.slices), judged("no message", checks.silent)),
            2,
            (Target("messages", "none"),),
            driver=DRIVER + "slices",
        ),
        Problem(
            "zero.step1",
            Spec(
                "Stage 1: step what is mine",
                "def step1(params, grads, state, comm, reduce_scatter, all_gather):",
                (
                    "params: whole tensors, the same on every rank; grads: this rank's gradients of them. Write new values into",
                    f"params, the same bits on every rank: those of Adam (lr 0.01, eps 1e-3) on {mean}.",
                    "state: a dict, {} at first, later what you left in it. Each step is a new process, and state is all that is",
                    "carried over. Its keys are texts, its values tensors, numbers or texts.",
                    scatter,
                    gather,
                    "adam_(p, g, m, v, step, lr=, eps=) steps p, m, v in place; step counts from 1.",
                ),
                minutes=40,
                difficulty=4,
                importance=5,
            ),
            (
                judged("parameters after five steps", checks.five_steps),
                judged("fewer elements than ranks", checks.few_elements),
                judged("state", checks.state),
                judged("cost", checks.step_cost),
            ),
            7,
            (
                Target("state of a rank", "2 Psi / n elements", "Psi: elements of all params"),
                Target("elements all ranks send", "2 (n - 1) Psi a step"),
            ),
            driver=DRIVER + "stepped",
        ),
        Problem(
            "zero.reduce_grads2",
            Spec(
                "Stage 2: nobody keeps a whole gradient",
                "def reduce_grads2(params, comm, reduce_scatter):",
                (
                    "Called once, before any backward. Return a list `mine`, as long as params, which fills itself in backward:",
                    f"mine[k] is then this rank's slice, flat, of {mean} of the gradient of params[k].",
                    "A further backward adds to it. A frozen parameter has None. After backward p.grad is None everywhere.",
                    scatter,
                    "p.register_post_accumulate_grad_hook(f) calls f(p) when the gradient of p is complete.",
                ),
                minutes=30,
                difficulty=3,
                importance=5,
            ),
            (
                judged("slices of the mean gradient", checks.gradient_slices),
                judged("two backwards, one frozen", checks.two_backwards),
                judged("gradients that live", checks.live_gradients),
                judged("cost", checks.gradient_cost),
            ),
            5,
            (
                Target("gradients of a rank", "Psi / n elements and one parameter's"),
                Target("elements all ranks send", "(n - 1) Psi a backward"),
            ),
            driver=DRIVER + "reduced",
        ),
        Problem(
            "zero.gathered",
            Spec(
                "Stage 3: borrow, use, give back",
                "def gathered(layer, comm, all_gather):",
                (
                    "A context manager (@contextmanager). layer.shard: this rank's slice, flat; layer.shape: the whole weight's.",
                    "Inside `with gathered(layer, comm, all_gather):` layer.weight is the whole weight; before and after, None.",
                    "Nobody holds on to the whole after it, also if there was an error inside; the error goes on.",
                    gather,
                ),
                minutes=30,
                difficulty=3,
                importance=5,
            ),
            (
                judged("loss and gradients", borrow.loss_and_gradients),
                judged("given back, also after an error", borrow.given_back),
                judged("weights that live", borrow.live_weights),
                judged("cost", borrow.borrow_cost),
            ),
            6,
            (
                Target("whole weights at a time", "two layers"),
                Target("elements all ranks send", "3 (n - 1) Psi a step", "two gathers and our reduce-scatter"),
            ),
            driver=DRIVER + "borrowed",
        ),
    ]
    return {p.asked: replace(p, forbidden=FORBIDDEN, cluster=WIRE, twist=t, picture=_picture) for p in made}


def _picture(outcome, ax=None):
    return plot_timeline(outcome.trace, ax=ax, title="your run")
