"""From the training server to the serving server: new weights while requests are being answered, and never half of them.

A `Shelf` is a file in memory with two places for a version of the weights. The writer fills the place that nobody reads, and then
turns one number, which says where the newest whole version lies; a reader takes that place, answers, and looks afterwards
whether the writer has come back to it meanwhile; if so it answers again. A writer that dies half way has turned nothing: readers
go on with the last whole version, and a new writer starts from it.

    published = (version, place);     a request counts  <=>  its place held the same version before and after

Reference: Lamport, "Concurrent Reading and Writing", CACM 20 (1977); Boehm, "Can Seqlocks Get Along with Programming Language
Memory Models?", MSPC 2012. Monolith (arXiv:2209.07663) for weights that go from training to serving every few minutes.
"""

import hashlib
import json
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..ranks.comm import Comm

__all__ = ["Shelf", "ShelfError", "receive_weights", "send_weights"]

MAGIC = b"fw-shelf"
CELL = 8  # bytes of a number; aligned, so that it is written in one piece
PAGE = 4096
PUBLISHED, PLACES = 16, 32  # where the published version stands, and from where each place's (version, checksum)
HEAD = PAGE  # bytes ahead of the first place; the table of names lies in them
BEING_WRITTEN = 0


class ShelfError(RuntimeError):
    """A shelf that holds no whole version, or none of its versions is what its checksum says."""


class Shelf:
    """Two versions of named tensors in a file that many processes see. One may write at a time; any number may read.

    `Shelf.create(path, tensors)` makes it with version 1, `Shelf.open(path)` joins. Memory: twice the tensors, once for all
    processes of the host.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        with open(self.path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            self._memory = mmap.mmap(file.fileno(), 0) if size >= HEAD else b""
        if self._memory[:8] != MAGIC:
            raise ValueError(f"{self.path.name} is not a shelf of weights; make one with Shelf.create(path, tensors)")
        length = self._number(8)
        table = json.loads(self._memory[64 : 64 + length])
        self.layout = {name: (dtype, tuple(shape), start) for name, dtype, shape, start in table["tensors"]}
        self.nbytes = table["nbytes"]
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        stride = -(-self.nbytes // PAGE) * PAGE
        if size < HEAD + 2 * stride:
            raise ValueError(f"{self.path.name} has {size} bytes of {HEAD + 2 * stride}: it was cut off; make it anew")
        self._head = whole[:HEAD].view(torch.int64)
        self._bodies = [whole[HEAD + k * stride : HEAD + k * stride + self.nbytes] for k in range(2)]
        self._views = [self._view(body) for body in self._bodies]
        self.again = 0  # how often a request of this process had to be answered again

    # --- making and joining ----------------------------------------------------------------------------------------
    @classmethod
    def create(cls, path: str | os.PathLike, tensors: Mapping[str, torch.Tensor]) -> "Shelf":
        """A new shelf with room for two versions of `tensors`, and these as version 1. FileExistsError where there is one."""
        table, start = [], 0
        for name, x in tensors.items():
            table.append((name, str(x.dtype).removeprefix("torch."), list(x.shape), start))
            start += -(-x.nbytes // 64) * 64
        text = json.dumps({"tensors": table, "nbytes": start}).encode()
        if not tensors or len(text) > HEAD - 64:
            raise ValueError(f"{len(tensors)} tensors; a shelf takes at least one, and names of at most {HEAD - 64} bytes in all")
        stride = -(-start // PAGE) * PAGE
        path, half = Path(path), Path(f"{path}.{os.getpid()}.new")
        if path.exists():
            raise FileExistsError(f"there is a shelf at {path.name} already; Shelf.open(path) joins it")
        with open(half, "wb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + bytes(48) + text)
            file.truncate(HEAD + 2 * stride)
        shelf = cls(half)
        shelf.publish(tensors)
        os.replace(half, path)  # who opens it finds version 1
        shelf.path = path
        return shelf

    @classmethod
    def open(cls, path: str | os.PathLike, *, patience: float = 0.0) -> "Shelf":
        """Join a shelf; wait up to `patience` seconds for it to appear. FileNotFoundError where it does not."""
        deadline = time.monotonic() + patience
        while not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        if not Path(path).exists():
            waited = f" after {patience:g} s" if patience else ""
            raise FileNotFoundError(f"no shelf at {Path(path).name}{waited}; Shelf.create(path, tensors) makes it")
        return cls(path)

    # --- writing ---------------------------------------------------------------------------------------------------
    @property
    def version(self) -> int:
        """The newest whole version; 0 before the first."""
        return self._published()[0]

    def publish(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write the next version and turn to it; returns its number. Only one process may write at a time.

        ValueError where names, shapes or dtypes are not the shelf's, or a tensor holds a nan, which would answer every request
        from then on: nothing is written then.
        """
        self._same(tensors)
        for name, x in tensors.items():
            if bool(torch.isnan(x.detach().sum())) and bool(torch.isnan(x).any()):  # one pass, and nearly always the end of it
                raise ValueError(f"{name!r} holds a nan: not written, the shelf stays at version {self.version}")
        version, place = self.version + 1, self._free_place()
        self._open_place(place)
        self._fill(place, tensors)
        self._close_place(place, version)
        self._turn(place, version)
        return version

    def _free_place(self) -> int:
        """The place that is not published: no request begins there."""
        return 1 - self._published()[1] if self.version else 0

    def _open_place(self, place: int) -> None:
        """From now on what lies there is no version, and a reader that is still at it will see so."""
        self._head[(PLACES + 16 * place) // 8] = BEING_WRITTEN
        _fence()

    def _fill(self, place: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, x in tensors.items():
            self._views[place][name].copy_(x.detach())

    def _close_place(self, place: int, version: int) -> None:
        self._head[(PLACES + 16 * place + 8) // 8] = self._checksum(place)
        _fence()
        self._head[(PLACES + 16 * place) // 8] = version
        _fence()

    def _turn(self, place: int, version: int) -> None:
        """One number of 8 bytes is written, in one piece: before it the old version is published, after it the new one."""
        self._head[PUBLISHED // 8] = 2 * version + place
        _fence()

    # --- reading ---------------------------------------------------------------------------------------------------
    def ask(self, answer: Callable[[dict[str, torch.Tensor]], Any], *, tries: int = 1000) -> tuple[int, Any]:
        """(version, answer(tensors)), where the tensors are the shelf's own memory: whole during the call, or it is made again.

        `answer` must not keep or change them, and must bear rubbish, since an answer made while the writer came by is thrown
        away. ShelfError after `tries`: the answer takes so long that the writer laps it each time (take() copies first).
        """
        for _ in range(tries):
            version, place = self._published()
            if not version:
                raise ShelfError(f"the shelf {self.path.name} holds no version yet")
            if not self._still(place, version):
                continue
            error = result = None
            try:
                result = answer(self._views[place])
            except Exception as caught:
                error = caught
            if self._still(place, version):
                if error is not None:
                    raise error  # it is the answer's own, the weights were whole
                return version, result
            self.again += 1
        raise ShelfError(f"the writer has come by {tries} times while this request was being answered; take() a copy first")

    def take(self) -> tuple[int, dict[str, torch.Tensor]]:
        """(version, a copy of its tensors)."""
        return self.ask(lambda tensors: {name: x.clone() for name, x in tensors.items()})

    def restore(self) -> tuple[int, dict[str, torch.Tensor]]:
        """What a new training server starts from: the published version, its checksum compared. ShelfError if it is not whole."""
        version, place = self._published()
        if not version or self._number(PLACES + 16 * place) != version:
            raise ShelfError(f"the shelf {self.path.name} holds no whole version")
        if self._number(PLACES + 16 * place + 8) != self._checksum(place):
            raise ShelfError(f"version {version} on the shelf {self.path.name} is not what was written")
        return version, {name: x.clone() for name, x in self._views[place].items()}

    def close(self) -> None:
        """Forget the memory; the file stays until it is removed. What is asked afterwards raises ShelfError."""
        self._memory = self._head = self._bodies = self._views = None

    def _published(self) -> tuple[int, int]:
        return divmod(self._number(PUBLISHED), 2)

    def _still(self, place: int, version: int) -> bool:
        """Whether `place` holds `version`, now that all that was read before has been read."""
        _fence()
        return self._number(PLACES + 16 * place) == version

    def _number(self, where: int) -> int:
        if self._memory is None:
            raise ShelfError(f"the shelf {self.path.name} was closed; Shelf.open(path) joins it again")
        return int.from_bytes(self._memory[where : where + CELL], "little")

    def _checksum(self, place: int) -> int:
        return zlib.crc32(self._bodies[place].numpy())

    def _view(self, body: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {}
        for name, (dtype, shape, start) in self.layout.items():
            kind = getattr(torch, dtype)
            count = torch.Size(shape).numel()
            views[name] = body[start : start + count * kind.itemsize].view(kind).view(shape)
        return views

    def _same(self, tensors):
        given = {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()}
        held = {name: (dtype, shape) for name, (dtype, shape, _) in self.layout.items()}
        if given != held:
            odd = sorted(set(given.items()) ^ set(held.items()))[0][0]
            raise ValueError(f"{odd!r} is {given.get(odd, 'missing')} here and {held.get(odd, 'not')} on the shelf: not written")


def send_weights(comm: Comm, tensors: Mapping[str, torch.Tensor], version: int, to: int) -> None:
    """Push one version to the serving server, rank `to`: a header of 16 bytes (version, and a digest of names, shapes and dtypes)
    and one message for each tensor. Pair of `receive_weights`.
    """
    form = _form({name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()})
    requests = [comm.isend(torch.tensor([version, form], device=comm.device), to, 7)]
    requests += [comm.isend(x.detach().contiguous(), to, 8) for x in tensors.values()]
    for request in requests:
        request.wait()


def receive_weights(comm: Comm, shelf: Shelf, frm: int) -> int:
    """Receive a version from rank `frm` aside, and publish it once all of it is here. Returns the sender's number of it.

    ValueError where the sender's tensors are not the shelf's, in names, order, shapes and dtypes: nothing is written then.
    """
    head = comm.recv(torch.empty(2, dtype=torch.int64, device=comm.device), frm, 7)
    if int(head[1]) != _form({name: (dtype, shape) for name, (dtype, shape, _) in shelf.layout.items()}):
        raise ValueError(
            f"rank {frm} sends tensors of other names, shapes or dtypes than the shelf's, or in another order; the shelf holds "
            f"{', '.join(list(shelf.layout)[:3])}{' ...' if len(shelf.layout) > 3 else ''}"
        )
    aside = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device)
        for name, (dtype, shape, _) in shelf.layout.items()
    }
    for request in [comm.irecv(x, frm, 8) for x in aside.values()]:
        request.wait()
    shelf.publish(aside)
    return int(head[0])


def _form(kinds: Mapping[str, tuple]) -> int:
    """63 bits that depend on names, dtypes, shapes and their order."""
    return int.from_bytes(hashlib.blake2b(repr(list(kinds.items())).encode(), digest_size=8).digest(), "little") >> 1


def _fence() -> None:
    """Nothing written or read before this is seen to happen after it. Taking and giving back two locks in a row does that on
    every processor; on x86 the order of writes, and that of reads, is kept anyway.
    """
    for _ in range(2):
        with threading.Lock():
            pass
