"""The process that a learner's code is loaded into: it forks one child a rank, and knows nothing that the judge knows.

It is started afresh, so no expected value is in its memory; modules that hold the answer cannot be imported here; and ranks
share nothing but messages, since each is a process. The judge (course/judge.py) talks to it over one socket.

    load -> names of functions,     rank (with a socket of its own) -> a fork that serves it,     end -> no process left

Reference: the fork server of Python's multiprocessing.
"""

import contextlib
import faulthandler
import gc
import glob
import importlib
import importlib.abc
import importlib.machinery
import io
import linecache
import os
import signal
import socket
import sys
import traceback
import types

import torch

from . import plain
from .remote import serve
from .ship import unpack_value

__all__ = ["Forbidden", "main"]


class Forbidden(ImportError):
    """A module that holds what the task asks for."""


def _refuse_files(names, roots):
    """No file that holds an answer is opened from now on, and no other program is started: what Python does passes this hook,
    which cannot be taken away again. Files are known by their numbers, whatever the path to them.

    names: modules; roots: folders of the library, this one's and the judge's.
    """
    found = set()
    for name in names:
        package, *rest = name.split(".")
        theirs = [os.path.dirname(sys.modules[package].__file__)] if package in sys.modules else []
        for base in roots if package == "fourwalls" else theirs:
            found |= _numbers(os.path.join(base, *rest))
    for root in roots:
        found |= _numbers(os.path.join(root, "..", "..", "labs", "source"))
    programs = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system")

    def hook(event, args, wanted=frozenset(found), stat=os.stat, programs=programs, function=types.FunctionType):
        if event == "open":
            if not isinstance(args[0], int):
                try:
                    seen = stat(args[0])
                except (OSError, ValueError, TypeError):
                    return
                if (seen.st_dev, seen.st_ino) in wanted:
                    raise PermissionError("this file cannot be read here: it holds what a task asks you to write")
        elif event in programs:
            raise PermissionError("no other program is started here")
        elif event == "object.__setattr__" and type(args[0]) is function and str(args[0].__module__).startswith("fourwalls."):
            raise PermissionError("the library's functions are not yours to change")

    sys.addaudithook(hook)


def _numbers(place):
    """(device, inode) of a module's file or of all files in a folder, their compiled twins included."""
    found, (folder, name) = set(), os.path.split(place)
    twins = glob.glob(os.path.join(glob.escape(folder), "__pycache__", f"{name}.*.pyc"))
    inside = [os.path.join(at, file) for at, _, files in os.walk(place) for file in files]
    for path in (f"{place}.py", *twins, *inside):
        with contextlib.suppress(OSError):
            seen = os.stat(path)
            found.add((seen.st_dev, seen.st_ino))
    return found


class _Guard(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Keeps forbidden packages from being imported. A forbidden module of a package that is allowed becomes an empty one, since
    the package imports it: whatever is asked of it is refused when it is called.
    """

    def __init__(self, names):
        self._names = tuple(names)

    def find_spec(self, name, path=None, target=None):
        word = next((w for w in self._names if name == w or name.startswith(w + ".")), None)
        if word is None:
            return None
        if word.count(".") < 2:
            raise Forbidden(f"{name} cannot be imported here: it holds what this task asks you to write")
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__name__

        def refuse(*_, **__):
            raise Forbidden(f"{name} cannot be used here: it holds what this task asks you to write")

        module.__getattr__ = lambda attribute: refuse if not attribute.startswith("__") else _missing(attribute)


def _missing(attribute):
    raise AttributeError(attribute)


def main(number: int, imported=()) -> None:
    """Serve the judge on the socket with this file number until it closes. imported: (name, function) of drivers."""
    torch.set_num_threads(1)
    control = socket.socket(fileno=number)
    names: dict = {}
    programs = dict(imported)  # drivers as they were before anything of the learner's was here
    children: set[int] = set()
    copies: set[int] = set()  # they end when their own judge leaves them
    while True:
        copies -= {pid for pid in copies if os.waitpid(pid, os.WNOHANG)[0]}
        try:
            question, fds = _receive(control)
        except (EOFError, OSError):
            break
        verb, *rest = question
        try:
            if verb == "rank":
                answer = _fork(control, fds[0], names, programs, *rest)
                children.add(answer)
            elif verb == "import":
                answer = _import(programs, *rest)
            elif verb == "copy":
                answer = _copy(control, programs, *fds)
                copies.add(answer)
            elif verb == "end":
                answer = _end(children)
            elif verb == "where":
                answer = _where(rest[0], children)
            else:
                answer = _LOADERS[verb](names, *rest)
        except Exception as error:
            plain.write(control, ["error", type(error).__name__, str(error)[:4000]])
        else:
            plain.write(control, ["ok", answer])
        for fd in fds:
            os.close(fd)
    _end(children)


def _receive(control):
    first, fds, _, _ = socket.recv_fds(control, 1, 2)  # one byte, beside which files may come along
    if not first:
        raise EOFError
    return plain.read(control), list(fds)


def _forbid(names, forbidden, judges):
    """Take away the modules that hold answers, and torch's own collectives. judges: the judge's folder of the library."""
    for name in [n for n in sys.modules if any(n == word or n.startswith(word + ".") for word in forbidden)]:
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(last, None)
        del sys.modules[name]
    sys.meta_path.insert(0, _Guard(forbidden))
    if forbidden:
        own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        _refuse_files(forbidden, sorted({own, judges}))
    import torch.distributed as native

    def refused(*_, **__):
        raise RuntimeError("torch's own collectives are not part of this task: build it from messages")

    for name in ("init_process_group", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv"):
        setattr(native, name, refused)
    return True


def _load_pickle(names, name, data, sources):
    """A function of a notebook, as ship.py packed it in the learner's own kernel, and the texts of its cells."""
    for file, source in sources.items():
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names[name] = unpack_value(data.numpy().tobytes())[0]
    return True


class _Lab:
    """Stands for `fw.lab(...)` in a notebook that is graded: it shows and checks nothing. reference: for our own solutions."""

    def __init__(self, reference):
        self.reference = reference

    def show(self, task):
        """Nothing."""

    def check(self, function, task=None):
        """Nothing."""


class _Shell:
    """Stands for `get_ipython()`: whatever a cell asks of the notebook's own shell does nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def _load_cells(names, cells, reference):
    """Run cells [(file name, source)] one after the other in one namespace, as a kernel would. Returns [error text or None]."""
    vars(sys.modules["fourwalls"])["lab"] = lambda name, twist=None: _Lab(reference)
    shows = {"display": lambda *_, **__: None, "get_ipython": _Shell}
    space = names.setdefault("", {"__name__": "__main__", "__builtins__": __builtins__, **shows})
    said = []
    for file, source in cells:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(source, file, "exec"), space)
            said.append(None)
        except BaseException as error:  # a cell that fails, or exits, takes nobody along
            said.append("".join(traceback.format_exception_only(error)).strip()[:4000])
    names.update({key: value for key, value in space.items() if callable(value) and not key.startswith("_")})
    return said


def _import(programs, drivers):
    """Import drivers now, and whatever they set up, so that no rank has to. prepare() of one, if it has such, changes this
    process before anything of the learner's is in it, and names modules whose files hold an answer.
    """
    for driver in drivers:
        name, _, function = driver.rpartition(".")
        module = importlib.import_module(name)
        programs.update((f"{name}.{key}", value) for key, value in vars(module).items() if callable(value))
        prepare = vars(module).get("prepare")
        if prepare is not None:
            _refuse_files(prepare(), ())
    return True


_LOADERS = {
    "forbid": _forbid,
    "pickle": _load_pickle,
    "cells": _load_cells,
}


def _fork(control, fd, names, programs, driver, wanted, args, options):
    """A child that runs driver(comm, functions, *args) as one rank and serves the socket `fd`. Returns its process id."""
    missing = [name for name in wanted if name not in names]
    if missing:
        raise NameError(f"there is no function {', '.join(missing)}")
    call = programs.get(driver)
    if call is None:
        module, _, function = driver.rpartition(".")
        call = getattr(importlib.import_module(module), function)  # here, so that each child has it already
    gc.collect(0)
    gc.freeze()  # what is shared stays shared: a collection in a child would copy every page that it looks at
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
        control.close()
        stream = socket.socket(fileno=fd)
        functions = {name: names[name] for name in wanted}
        serve(stream, call, (functions, *args), **options)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


def _copy(control, programs, fd, output):
    """A fork of this process, in a session of its own, that serves another judge on the socket `fd` and prints to `output`."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        control.close()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        main(fd, programs.items())
    finally:
        os._exit(0)


def _where(child, children):
    """Let a child that does not come back write its Python lines to the output, where the judge reads them."""
    if child in children and hasattr(signal, "SIGUSR1"):
        os.kill(child, signal.SIGUSR1)
    return True


def _end(children):
    """Kill and reap every child; how many were still alive."""
    alive = 0
    for child in list(children):
        with contextlib.suppress(ProcessLookupError):
            if os.waitpid(child, os.WNOHANG)[0] == 0:
                alive += 1
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        children.discard(child)
    return alive
