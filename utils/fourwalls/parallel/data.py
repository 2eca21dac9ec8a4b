"""Data parallelism: every rank holds the whole model and sees its own part of the batch; gradients are summed before each step.

`naive` sums one gradient after the other when backward is over; `bucketed` packs them first; `overlapped` sends a bucket as soon
as backward has filled it, while backward goes on. All three give the same gradients, which are one device's on the joined batch:
if all ranks' losses are means over equally many things (average="ranks"), or if they are sums and the number of things is given
(average="tokens").

    g  =  1/n  sum over ranks of g_r          or          g  =  (sum over ranks of g_r) / (sum over ranks of tokens_r)

Reference: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020.
"""

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..collectives import broadcast, get_algorithm
from ..collectives.agree import agree
from ..nn.optim import clip_
from ..ranks.comm import Comm
from ..ranks.trace import PS
from .buckets import BUCKET_BYTES, Bucket, plan_buckets
from .lanes import in_place, make_lane
from .replicas import check_replicas, checksum
from .wrapped import claim, release

__all__ = ["AVERAGES", "MODES", "DataParallel"]

MODES = ("naive", "bucketed", "overlapped")
AVERAGES = ("ranks", "tokens", "none")
_CHOICES = {"mode": MODES, "average": AVERAGES, "unused": ("refuse", "zeros"), "start": ("refuse", "broadcast")}
_CHOICES["buffers"] = ("first", "average", "local")


class DataParallel:
    """`dp = DataParallel(model, comm)`, then in each step: `dp(x)`, loss, `loss.backward()`, `dp.synchronise()`, optimizer step.

    mode          "naive": an all-reduce a parameter, after backward. "bucketed": an all-reduce a bucket, after backward.
                  "overlapped": an all-reduce a bucket, begun when backward has filled it; on real ranks in a second thread (or by
                  torch's asynchronous one), on simulated ranks on a second clock (`ranks.beside`).
    bucket_bytes  a bucket is at most so large, unless it holds one larger parameter
    all_reduce    f(comm, x) -> the sum; one that takes `out=` works in place, one that takes `bucket=` is told the bucket's
                  number. Or a name: an algorithm of `collectives`, or "native" for torch's own.
    average       "ranks": divide by the number of ranks, for losses that are means of equally many things. "tokens": losses are
                  sums, divide by the sum of what `synchronise(tokens=...)` is given on each rank. "none": leave the sum.
    unused        a parameter without gradient. "refuse": ValueError that names it. "zeros": it counts as 0 on this rank; where no
                  rank has one, `grad` stays None (one int32 a parameter more on the wire)
    start         "refuse": ValueError that names what differs between ranks before the first step (8 to 24 bytes a rank).
                  "broadcast": take rank 0's
    buffers       such as batch norm's running mean, after each `synchronise`: "first": rank 0's go to all; "average"; "local":
                  stay
    finite        raise ValueError, which names rank and parameter, before a gradient with nan or inf is sent. None: as
                  comm.checks

    From when it comes until `synchronise`, a gradient is this rank's, divided already, in a bucket that may be under way: change
    it before, by `p.register_hook`, or afterwards. RuntimeError where `p.grad` is made another tensor in between.
    Gradients may not be kept from step to step: `p.grad` is a view of a bucket that the next step fills again. They may be added
    to (no zero_grad) with average="ranks" alone, and otherwise are refused: what is in `p.grad` is everybody's sum already.
    After a backward that raised, on every rank: `synchronise(shadow=True)`, zero_grad, and repeat it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        comm: Comm,
        *,
        mode: str = "overlapped",
        bucket_bytes: int = BUCKET_BYTES,
        all_reduce: Callable | str = "ring",
        average: str = "ranks",
        unused: str = "refuse",
        start: str = "refuse",
        buffers: str = "first",
        finite: bool | None = None,
    ):
        given = {"mode": mode, "average": average, "unused": unused, "start": start, "buffers": buffers}
        for word, value in given.items():
            if value not in _CHOICES[word]:
                raise ValueError(f"{word} is {value!r}; one of {', '.join(map(repr, _CHOICES[word]))}")
        self.module, self.comm, self.mode, self.average, self.unused, self.buffers = model, comm, mode, average, unused, buffers
        self.finite = comm.checks if finite is None else finite
        self.buckets: list[Bucket] = plan_buckets(model.named_parameters(), 1 if mode == "naive" else bucket_bytes)
        if mode == "naive":  # in the order of the model: nothing is gained by another
            self.buckets.reverse()
            for index, bucket in enumerate(self.buckets):
                bucket.index = index
        if not self.buckets:
            raise ValueError("the model has no parameter to train; requires_grad is False everywhere, or there is none")
        self._trained = {id(p) for b in self.buckets for p in b.parameters}
        self._home = {name: b for b in self.buckets for name in b.names}
        self._known = {id(p) for p in model.parameters()}
        claim(model, self, alone=mode == "overlapped")
        agree(comm, "DataParallel", bucket_bytes=bucket_bytes, **given)
        native = all_reduce == "native"
        if native and comm.size != comm.native.get_world_size():
            whole = comm.native.get_world_size()
            raise ValueError(f"all_reduce='native' sums over all {whole} ranks of the run, not over {comm.size}; try 'ring'")
        self._divisor = comm.size if average == "ranks" else 1  # of each gradient before the sum
        self._same_bits = False  # whether the sum is known to have the same bits on every rank
        if isinstance(all_reduce, str) and not native:
            all_reduce = get_algorithm("all_reduce", all_reduce)
            self._same_bits = True
        self._reduce = None if native else in_place(all_reduce)
        self._sync, self._hooks, self._steps = True, [], 0
        self._left: set[str] = set()  # parameters whose p.grad is still what the last synchronise() left there
        self._kept: set[str] = set()  # those to which backward has then added
        self.all_reduces = self.bytes_reduced = 0  # calls since the start, and the bytes of the tensors that they summed
        self.jobs: list = []  # of the last synchronise(): label, given, begin, end (picoseconds of comm.clock())
        self.exposed = 0.0  # seconds that the last synchronise() took
        state = [*model.named_parameters(), *model.named_buffers()]
        if start == "broadcast":
            self._from_first(x for _, x in state)
        elif comm.size > 1:
            cure = "Build the model from one seed on every rank, or give start='broadcast' to take rank 0's."
            check_replicas(comm, state, when="before the first step", cure=cure)
        self._lane = make_lane(comm, native=native, beside=mode == "overlapped")
        if mode == "overlapped":
            self._watch("register_post_accumulate_grad_hook", "_arrived")
        if comm.size > 1 and (mode == "overlapped" or average != "ranks" or comm.checks):
            self._watch("register_hook", "_arrives")

    # --- the training step ------------------------------------------------------------------------------------------
    def __call__(self, *args, **kwargs):
        """The model's forward. Sends nothing, so one rank alone may evaluate (with `module.eval()` and `torch.no_grad()`)."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """`with dp.no_sync(): loss.backward()` only accumulates: for all micro-batches of a step but the last.

        What counts is where *backward* runs: a gradient that arrives inside the block stays here, wherever its forward ran
        (torch's DistributedDataParallel decides in forward). After the block's micro-batches come one backward outside, and
        `synchronise()`.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def synchronise(self, *, tokens: int | None = None, shadow: bool = False) -> int:
        """Finish the sums: afterwards every rank's gradients are the same bits, in `p.grad`. Every rank must call it in each
        step.

        tokens: for average="tokens", how many things this rank's losses of this step were summed over, all micro-batches
        together. shadow: this rank had no batch in this step; it takes part with zeros (see `batches.together`).
        Returns what the sum was divided by. Raises ValueError for a rank that has run no backward, and as `unused` and `finite`
        say.

        Bytes a rank sends: those of one all-reduce a bucket (ring: 2 (n-1)/n of it), 8 for the tokens, 4 a parameter for
        unused="zeros", and the buffers.
        """
        began = self.comm.clock()
        tokens = tokens if tokens is None else self._whole(tokens)
        if (tokens is not None) != (self.average == "tokens"):
            wants = "needs synchronise(tokens=...), what its losses are summed over" if tokens is None else "takes no tokens"
            raise ValueError(f"average={self.average!r} {wants}")
        if shadow:  # nothing of an earlier step may slip in
            for bucket in self.buckets:
                for p in bucket.parameters:
                    p.grad = None
        self._check_arrived(shadow)
        self._check_alike()
        parameters = [p for b in self.buckets for p in b.parameters]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=self.comm.device)
        for bucket in self.buckets:  # what backward has not launched
            if not bucket.launched:
                self._launch(bucket)
        if self.unused == "zeros":
            self._give("unused parameters", used)
        count = torch.tensor([tokens or 0], dtype=torch.int64, device=self.comm.device)
        if self.average == "tokens":
            self._give("tokens", count)
        self.jobs = self._lane.join()
        divisor = max(1, int(count)) if self.average == "tokens" else self.comm.size if self.average == "ranks" else 1
        for bucket in self.buckets:
            self._check_not_replaced(bucket)
            if self.average == "tokens":
                bucket.flat.div_(divisor)
        if self.unused == "zeros":
            for p, ranks in zip(parameters, used.tolist(), strict=True):
                if ranks == 0:
                    p.grad = None
        self._share_buffers()
        for bucket in self.buckets:
            bucket.reset()
        self._left, self._kept = set(self._home), set()
        self._steps += 1
        self.exposed = (self.comm.clock() - began) / PS
        return divisor

    def clip_(self, largest: float, *, order: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `largest`; returns the norm before. After `synchronise`.

        Every rank holds all gradients, so the norm needs no message (of shards it does: `nn.optim.global_norm(comm=...)`).
        ValueError (comm.checks) where a backward has come since: it would scale this rank's own gradients.
        """
        if self.comm.checks and self.comm.size > 1 and len(self._left) < len(self._home):
            where = f"rank {self.comm.rank}, step {self._steps}"
            raise ValueError(f"{where}: clip_() before synchronise() would scale this rank's own gradients; call it after")
        return clip_((p for b in self.buckets for p in b.parameters), largest, order=order)

    def check_equal(self, when: str = "") -> None:
        """Raise ValueError, which names ranks and tensors, unless all ranks hold the same parameters and gradients: every bit."""
        named = list(self.module.named_parameters())
        grads = [(f"gradient of {name}", p.grad) for name, p in named if p.grad is not None]
        cure = "Some step was not synchronised, or its synchronised micro-batch was not the last."
        check_replicas(self.comm, named + grads, when=when, cure=cure)

    def close(self) -> None:
        """Take the hooks off the model; it may be wrapped anew."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        release(self.module, self)

    # --- inside -----------------------------------------------------------------------------------------------------
    def _watch(self, register, method):
        """Call the method with a parameter's name at each parameter's hook `register`, for as long as this object lives."""
        myself = weakref.ref(self)

        def watch(name):
            def hook(_):
                dp = myself()
                if dp is not None:
                    getattr(dp, method)(name)

            return hook

        for bucket in self.buckets:
            for name, p in zip(bucket.names, bucket.parameters, strict=True):
                self._hooks.append(getattr(p, register)(watch(name)))

    def _arrives(self, name):
        """A gradient is about to be added to p.grad."""
        bucket = self._home[name]
        if name in bucket.placed and not bucket.launched:  # of a second backward: what is there has been divided already
            self._put_back(bucket, bucket.names.index(name))
        if name in self._left:
            self._left.discard(name)
            if self.average != "ranks" or self.comm.checks:
                self._check_cleared(name)

    @torch.no_grad()
    def _put_back(self, bucket, place):
        if bucket.is_placed(place):
            bucket.views[place].mul_(self._divisor)
        elif bucket.parameters[place].grad is not None:
            self._check_not_replaced(bucket)
        bucket.placed.discard(bucket.names[place])

    def _check_not_replaced(self, bucket):
        if self.comm.size > 1 and (names := bucket.replaced()):
            raise RuntimeError(
                f"rank {self.comm.rank}, step {self._steps}: the gradient of {names[0]} was put into its bucket and then p.grad "
                "was made another tensor, which no sum knows. Change gradients by p.register_hook, or after synchronise()"
            )

    def _check_cleared(self, name):
        """Note that the last step's gradient is still in p.grad, and is no zero; where it may not be added to, raise."""
        bucket = self._home[name]
        place = bucket.names.index(name)
        grad = bucket.parameters[place].grad
        if grad is None or grad is not bucket.views[place] or not bool(grad.any()):
            return
        self._kept.add(name)
        if self.average != "ranks":
            raise RuntimeError(
                f"rank {self.comm.rank}, step {self._steps}: {name} still has the gradient of the last step, the sum of all "
                "ranks; summed again it would count once for each. zero_grad() comes between synchronise() and backward"
            )

    def _arrived(self, name):
        """A gradient is complete for this backward (a tied parameter's once, with all its uses in it)."""
        bucket = self._home[name]
        if bucket.launched:
            word = "under no_sync(), after" if not self._sync else "a second time, when"
            raise RuntimeError(
                f"rank {self.comm.rank}: the gradient of {name} arrives {word} its bucket has been sent: synchronise() is "
                "missing after the last backward, or it was not the last micro-batch that ran outside no_sync()"
            )
        if not self._sync:
            return
        bucket.waiting.discard(name)
        bucket.place(bucket.names.index(name), self._divisor)  # now, while it is in the cache
        for bucket in self.buckets:  # all ranks must send in one order, whichever bucket is full first here
            if not bucket.is_full():
                break
            if not bucket.launched:
                self._launch(bucket)

    def _launch(self, bucket):
        self._check_not_replaced(bucket)
        bucket.pack(self._divisor)
        if self.finite and (names := bucket.not_finite()):
            for place in range(len(bucket.names)):  # as they were: more may be added to them, or zeros be put there
                self._put_back(bucket, place)
            if self.mode != "overlapped":  # nothing is under way: all may be sent again
                self._lane.join()
                for b in self.buckets:
                    b.reset()
            more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
            where = f"rank {self.comm.rank}, step {self._steps}: nan or inf in the gradient of {names[0]}{more}"
            raise ValueError(f"{where}, before any sum: look at this rank's batch and loss")
        bucket.launched = True
        self._give(f"bucket {bucket.index}", bucket.flat, bucket.index)

    def _give(self, label, x, index=None):
        self.all_reduces += 1
        self.bytes_reduced += x.nbytes
        self._lane.start(label, x, self._reduce, index)

    def _check_arrived(self, shadow):
        for n, p in self.module.named_parameters():
            if p.requires_grad and id(p) not in self._trained:
                was = "was frozen when" if id(p) in self._known else "has come after"
                now = " and is not now" if id(p) in self._known else ""
                raise ValueError(f"{n} {was} DataParallel was made{now}; make a new DataParallel")
        missing = [n for b in self.buckets for n, p in zip(b.names, b.parameters, strict=True) if p.grad is None]
        if shadow:
            return
        if self.comm.size > 1 and (self.average != "ranks" or self.comm.checks):
            for name in sorted(self._left):
                self._check_cleared(name)
        who = f"rank {self.comm.rank}, step {self._steps}"
        if len(missing) == len(self._home):
            raise ValueError(f"{who}: synchronise() without a backward; a rank that has no batch calls synchronise(shadow=True)")
        if missing and self.unused == "refuse":
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            bucket = self._home[missing[0]]
            if not bucket.parameters[bucket.names.index(missing[0])].requires_grad:
                raise ValueError(f"{who}: {missing[0]} was trained when DataParallel was made and is frozen now; make a new one")
            raise ValueError(
                f"{who}: no gradient for {missing[0]}{more}: the loss does not depend on it. Freeze it (requires_grad_(False)), "
                "or give unused='zeros'"
            )

    def _check_alike(self):
        """With checks on: MismatchError unless all ranks come from the same step: with equal weights, if the sums have the same
        bits everywhere, and with or without what the last step has left in p.grad.
        """
        if self.comm.checks and self.comm.size > 1:
            alike = {"step": self._steps, "gradients not cleared": len(self._kept)}
            if self._same_bits:
                alike["checksum of the weights"] = checksum(p for b in self.buckets for p in b.parameters)
            agree(self.comm, "DataParallel.synchronise", **alike)

    def _whole(self, tokens):
        try:
            number = -1 if isinstance(tokens, bool) else operator.index(tokens)
        except TypeError:
            number = -1
        if number < 0:
            raise ValueError(f"rank {self.comm.rank}: tokens is {tokens!r}; a whole number of at least 0")
        return number

    @torch.no_grad()
    def _share_buffers(self):
        state = list(self.module.buffers())
        if self.buffers == "first":
            self._from_first(state)
        elif self.buffers == "average":
            for x in state:
                if x.is_floating_point():
                    own = x.detach().clone(memory_format=torch.contiguous_format)
                    x.copy_(self._sum_now(own) / self.comm.size)

    def _sum_now(self, x):
        self._give("buffer", x.view(-1))
        self._lane.join()
        return x

    @torch.no_grad()
    def _from_first(self, tensors):
        for x in tensors:
            if self.comm.size > 1:
                broadcast(self.comm, x, out=x)
