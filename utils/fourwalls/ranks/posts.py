"""One message of a simulated rank, from the call that begins it to the wait that ends it.

A send carries a copy of what was sent at the moment it was sent, and that reaches the receiver's buffer only at `wait()`, so
that a forgotten wait and a buffer changed too early show themselves in every run. The copy is plain bytes wherever a tensor is
nothing but its bytes: torch takes three times as long to copy a small tensor.

    post (payload = a copy) -> delivered (`done_at`) -> wait (the clock moves there; payload -> buffer)

Reference: the MPI standard, "Nonblocking Communication" (a buffer belongs to the message until it is complete).
"""

from bisect import bisect

import torch
from torch._C import _len_torch_dispatch_stack
from torch.autograd.graph import increment_version

from .buffers import put_bytes, take_bytes
from .comm import Call, MismatchError, Request
from .diagnose import describe
from .trace import PS

__all__ = ["Receive", "Send", "as_tensor"]

_POLL = PS // 10**6  # asking whether a message is done takes a microsecond


class Post(Request):
    """One side of a message in the simulator. `time`: when it was posted; `done_at`: when it has arrived; `site`: where it was
    called; `start`: where its bytes lie, 0 where torch must copy them; `payload`: what travels, as bytes or else as a tensor;
    `comm`: None when it has been waited for.
    """

    __slots__ = ("channel", "comm", "done_at", "dtype", "nbytes", "op", "payload", "shape", "site", "start", "tensor", "time")

    @property
    def done(self) -> bool:
        comm = self.comm
        if comm is None:
            return True
        if self.done_at is None:
            comm._idle(0)  # ranks whose clocks are behind may yet send what has arrived by now
        if self.done_at is None or self.done_at > comm.clock():
            comm._idle(_POLL)  # a loop that asks again and again must let time pass
        return self.done_at is not None and self.done_at <= comm.clock()

    @property
    def call(self) -> Call:
        """This call as error messages name it."""
        comm, tag = self.comm, self.channel.tag
        if isinstance(tag, str):  # an internal channel, which has a name instead of a tag
            tag = 0
        return Call(comm._me, self.op, self.peer, tag, self.shape, self.dtype, self.site)


def as_tensor(payload, post: Post) -> torch.Tensor:
    """What travels, as a tensor of its own."""
    if payload.__class__ is not bytes:
        return payload
    return torch.frombuffer(bytearray(payload), dtype=post.dtype).view(post.shape)


class Send(Post):
    """`version`: torch's count of writes when it was posted; `receive`, `ready`: the scheduler's."""

    __slots__ = ("ready", "receive", "version")

    @property
    def peer(self) -> int:
        return self.channel.dst

    def wait(self):
        comm = self.comm
        if comm is None:
            return
        if self.done_at is None or comm._lazy_clock is not None or self.done_at > comm._clock[comm._me]:
            comm._wait(self, self if self.receive is not None else None)
        del comm._sends_open[self]
        try:
            if self.version is not None and self.version != self.tensor._version and not self._unchanged():
                raise MismatchError(
                    f"the buffer of an isend was changed before its wait()\n  {describe(self.call)}", rank=comm._me
                )
        finally:
            self.comm = self.payload = self.tensor = None  # the scheduler may still have it in a list

    def _unchanged(self) -> bool:
        x, payload = self.tensor.detach(), self.payload
        if payload.__class__ is bytes and x.data_ptr() == self.start and x.nbytes == self.nbytes and x.is_contiguous():
            return take_bytes(self.start, self.nbytes) == payload
        if x.is_meta or not self.nbytes:
            return True
        if x.nbytes != self.nbytes or x.dtype != self.dtype:
            return False
        x, payload = x.contiguous().reshape(-1), as_tensor(payload, self).reshape(-1)
        return torch.equal(x.view(torch.uint8), payload.view(torch.uint8))


class Receive(Post):
    """Its payload is put into the buffer by `wait()`; `send`: the message's other side, once there is one."""

    __slots__ = ("send",)

    @property
    def peer(self) -> int:
        return self.channel.src

    def wait(self):
        x, comm = self.tensor, self.comm
        if comm is None:
            return x
        if self.done_at is None or comm._lazy_clock is not None or self.done_at > comm._clock[comm._me]:
            comm._wait(self, self.send)
        if comm._receives_open.pop(self) is not None:
            if self.start:
                i = bisect(comm._spans, self.start)
                del comm._spans[i - 1 : i + 1]
            else:
                del comm._scattered[self]
        try:
            payload, start, nbytes = self.payload, self.start, self.nbytes
            raw = start and payload.__class__ is bytes and not _len_torch_dispatch_stack()  # a mode wants to see the write
            if raw and x.data_ptr() == start and x.nbytes == nbytes and x.is_contiguous():
                put_bytes(start, payload, nbytes)
                increment_version(x)  # a write that autograd must know of
            else:
                self._put(payload)
        finally:
            self.comm = self.payload = None
        return x

    def _put(self, payload) -> None:
        x, comm = self.tensor, self.comm
        comm._check_tensor(x, "receive into")
        if x.shape != self.shape:
            raise MismatchError(
                f"the buffer of an irecv was given another shape, {tuple(x.shape)}, before its wait()\n  {describe(self.call)}",
                rank=comm._me,
            )
        with comm._world.paused(comm._me), torch.inference_mode(x.is_inference() or torch.is_inference_mode_enabled()):
            (x.detach() if x.requires_grad else x).copy_(as_tensor(payload, self))
