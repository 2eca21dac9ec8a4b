"""What happens inside a rank: take on the surroundings of the caller, meet the other ranks, run the program, answer.

The rank hears from the supervisor over one socket and answers over the same one: here are the surroundings, here is a
program, go, that was all. What it prints leaves through a pipe, what it waits for stands in the book, and it ends only when
the supervisor says so, so that no rank closes a connection that another still reads.

    hello -> (program -> ready -> go -> value or failure)* -> bye

Reference: torch.distributed, `init_process_group` with a store of its own.
"""

import atexit
import contextlib
import faulthandler
import io
import linecache
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from datetime import timedelta

from .machine import SESSION_MARK

__all__ = ["Channel", "main", "serve"]

_LENGTH = struct.Struct("<Q")


class SupervisorGone(EOFError):
    """The other end of the channel has closed. A kind of its own: a program may raise EOFError too."""


class Channel:
    """Whole objects over a stream socket, blocking."""

    def __init__(self, fd: int):
        self.socket = socket.socket(fileno=fd)
        self.socket.setblocking(True)

    def send(self, *message) -> None:
        data = pickle.dumps(message, protocol=5)
        self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple:
        """The next message; SupervisorGone when the other side is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(length))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            got = self.socket.recv_into(view[have:])
            if not got:
                raise SupervisorGone
            have += got
        return data


def main(rank: int, ranks: int, fds: dict[str, int]) -> None:
    """Be rank `rank` until told to stop; never returns.

    fds: "socket" to the supervisor, "output" for what is printed, "where" for the place it is at when asked, "book" the shared
    memory, "listen" the bound socket of the rendezvous (rank 0 uses it), "alive" (optional) a pipe that ends when the launcher
    does.
    """
    code = 1
    try:
        _surface(fds)
        serve(rank, ranks, fds)
        code = 0
    except SupervisorGone:
        pass  # the supervisor is gone, and the launcher is about to end us
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def serve(rank: int, ranks: int, fds: dict[str, int]) -> None:
    """Answer the supervisor's messages until "bye"."""
    channel = Channel(fds["socket"])
    _, hello = channel.receive()
    try:
        world = _meet(rank, ranks, fds, hello)
    except BaseException as error:
        channel.send("failed", _report(error, rank))
        channel.receive()
        return
    book = world.book
    channel.send("met", {})
    while True:
        kind, *message = channel.receive()
        if kind == "bye":
            return
        common, own, sources, seed, checks = message
        try:
            for name, text in sources.items():  # of notebook cells, for inspect.getsource
                linecache.cache[name] = (len(text), None, text.splitlines(True), name)
            program, args, kwargs = _unpack(common, own)
            book.forget_statements()
            book.say(_READY, time.perf_counter_ns())
            channel.send("ready", {})
            _, start = channel.receive()
            answer = _run(world, program, args, kwargs, seed=seed, checks=checks, start=start)
        except SupervisorGone:
            raise
        except BaseException as error:
            answer = ("failed", _report(error, rank))
        program = args = kwargs = None
        _flush()
        book.say(_DONE, time.perf_counter_ns())
        channel.send(*answer)
        answer = None


_READY, _DONE = 1, 5  # as in book.py, which imports torch: a fresh rank must be able to complain before that


def _surface(fds: dict[str, int]) -> None:
    """Standard streams: nothing to read, and one pipe for all that is written, line by line, from Python and from C."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(fds["output"], 1)
    os.dup2(fds["output"], 2)
    os.close(fds["output"])
    sys.stdin = sys.__stdin__ = _NoKeyboard()
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(
        io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True, write_through=True
    )
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True, write_through=True
    )
    _c_line_buffering()
    faulthandler.enable(file=fds["where"], all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=fds["where"], all_threads=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "alive" in fds:
        threading.Thread(target=_die_with_launcher, args=(fds["alive"],), daemon=True).start()


class _NoKeyboard(io.TextIOBase):
    """Standard input of a rank."""

    def _refuse(self, *_):
        raise RuntimeError(
            "a rank has no keyboard: input() and sys.stdin cannot be read here; pass the value as an argument of the program"
        )

    read = readline = readlines = __next__ = _refuse

    def readable(self):
        return True

    def fileno(self):
        return 0


def _c_line_buffering() -> None:
    """Make C's stdout send each line at once, though it is a pipe."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        stream = ctypes.c_void_p.in_dll(libc, "__stdoutp" if sys.platform == "darwin" else "stdout")
        libc.setvbuf(stream, None, 1, 0)  # 1 is _IOLBF on Linux and macOS
    except (ImportError, OSError, ValueError, AttributeError):
        pass  # then C's lines come when its buffer is full, or at the end


def _die_with_launcher(fd: int) -> None:
    """For systems that do not end a process with its parent: the other end of this pipe is open as long as the launcher lives."""
    os.read(fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _meet(rank: int, ranks: int, fds: dict[str, int], hello: dict):
    """Take on the caller's surroundings, then connect to the other ranks. Returns the transport's World."""
    mark = {SESSION_MARK: os.environ[SESSION_MARK]} if SESSION_MARK in os.environ else {}
    os.environ.clear()
    os.environ.update(hello["env"] | mark)
    sys.path[:] = hello["path"]
    os.chdir(hello["folder"])

    import torch

    from .book import Book
    from .transport import World

    torch.set_num_threads(hello["threads"])
    torch.set_default_dtype(getattr(torch, hello["dtype"]))
    book = Book(mmap.mmap(fds["book"], 0), ranks, rank)
    os.close(fds["book"])
    # torch's own collectives give up a little later than the supervisor, which can say more
    backend, timeout = hello["backend"], timedelta(seconds=hello["timeout"] + 1)
    dist = torch.distributed
    options = {"wait_for_workers": False, "timeout": timedelta(seconds=60)}
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", hello["port"], ranks, True, master_listen_fd=fds["listen"], **options)
    else:
        os.close(fds["listen"])
        store = dist.TCPStore("127.0.0.1", hello["port"], ranks, False, **options)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks, timeout=timeout)
        # NCCL runs what one pair of ranks has begun in one order; a second group for the way back keeps a send from
        # standing in the way of a receive
        backends = (dist.group.WORLD._get_backend(device), dist.new_group(backend="nccl")._get_backend(device))
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        backends = (dist.group.WORLD._get_backend(device),) * 2
    return World(rank=rank, size=ranks, device=device, backends=backends, book=book, by_order=backend == "nccl")


def _unpack(common: bytes, own: bytes) -> tuple:
    program, args, kwargs = pickle.loads(common)
    for place, value in (pickle.loads(own) if own else {}).items():
        if isinstance(place, int):
            args = (*args[:place], value, *args[place + 1 :])
        else:
            kwargs = {**kwargs, place: value}
    return program, args, kwargs


def _run(world, program, args, kwargs, *, seed: int, checks: bool, start: int) -> tuple:
    from .machine import seed_everything
    from .ship import pack_value

    seed_everything(seed, world.rank)
    world.begin(seed=seed, checks=checks, start=start)
    world.book.say(2, time.perf_counter_ns())
    value = program(world.comm(), *args, **kwargs)
    unwaited = world.settle()
    return "value", pack_value(value, world.rank), world.events, unwaited


def _report(error: BaseException, rank: int) -> dict:
    """What the supervisor needs to tell of this failure, in plain types."""
    from .comm import CommError
    from .diagnose import message_of, own_frames, shorten
    from .transport import PeerLost

    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    message = message_of(error)
    lost = isinstance(error, PeerLost) or (isinstance(error, RuntimeError) and _is_connection(message))
    shipped = None
    if isinstance(error, CommError) and not lost:
        shipped = (type(error).__name__, {k: v for k, v in error.__dict__.items() if k in ("rank", "about", "calls")})
    _flush()
    return {
        "rank": rank,
        "kind": type(error).__name__,
        "message": message,
        "frames": own_frames(frames),
        "text": shorten(_traceback(error)),
        "when": time.perf_counter_ns(),
        "lost": lost,
        "error": shipped,
    }


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # its own methods have failed
        return type(error).__name__


def _is_connection(message: str) -> bool:
    """Whether a torch error only says that another rank is gone or late."""
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "imed out waiting",
        "NCCL communicator was aborted",
    )
    return any(
        sign in message
        for sign in (*signs, "Connect timeout", "remote process exited", "Watchdog caught collective operation timeout")
    )


def _flush() -> None:
    """Let go of all that was printed, from Python and from C."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).fflush(None)


def _leave(code: int) -> None:
    """End without the interpreter's long good-bye, which would tear down torch's threads; exit handlers come first."""
    try:
        atexit._run_exitfuncs()
        _flush()
    except BaseException:
        pass
    os._exit(code)
