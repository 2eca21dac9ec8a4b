"""What travels between the notebook and its ranks: functions by value, tensors as bytes, results on the CPU.

A function from a cell, a script or a test does not exist in another process, so it is sent itself (cloudpickle), together
with the globals it uses; what is installed is sent by name. Nothing of the notebook runs a second time in a rank.

    bytes sent = once for what all ranks share + each rank's own `per_rank` items

Reference: cloudpickle, `register_pickle_by_value`.
"""

import functools
import importlib
import io
import linecache
import os
import pickle
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Mapping, Sequence

import cloudpickle
import torch

from .result import PerRank

__all__ = ["pack_program", "pack_value", "sources_in", "unpack_value"]

_LOCK = threading.Lock()


def pack_program(program: Callable, args: Sequence, kwargs: Mapping, ranks: int) -> tuple[bytes, list[bytes]]:
    """(what all ranks get, what each rank gets besides). ValueError naming what does not travel."""
    apart = {k: v for k, v in [*enumerate(args), *kwargs.items()] if isinstance(v, PerRank)}
    shared = tuple(None if i in apart else v for i, v in enumerate(args)), {k: v for k, v in kwargs.items() if k not in apart}
    with _LOCK, _by_value(_modules_of(program)):
        try:
            common = _dumps((program, *shared))
        except Exception as error:
            raise ValueError(_culprit(program, args, kwargs, error)) from None
        own = []
        for rank in range(ranks):
            try:
                own.append(_dumps({k: v[rank] for k, v in apart.items()}) if apart else b"")
            except Exception as error:
                raise ValueError(f"per_rank item {rank} cannot be sent to its rank: {_reason(error)}") from None
    return common, own


def pack_value(value, rank: int) -> bytes:
    """A program's result, ready to travel. TypeError naming the rank and the type if it cannot."""
    try:
        return _dumps(value)
    except Exception as error:
        part = _first_bad(value)
        what = f"its result ({type(value).__name__})" if part is None else f"its result holds {part}, which"
        raise TypeError(f"rank {rank} returned what cannot be sent back: {what} does not pickle: {_reason(error)}") from None


def unpack_value(data: bytes):
    """The result that `pack_value` packed."""
    return pickle.loads(data)


def sources_in(data: bytes) -> dict[str, str]:
    """Texts of the notebook cells whose functions are in `data`, so that `inspect.getsource` works in a rank."""
    cells = {name: entry[2] for name, entry in list(linecache.cache.items()) if len(entry) == 4 and not os.path.exists(name)}
    return {name: "".join(text) for name, text in cells.items() if name.encode() in data}


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but tensors go as plain bytes (torch's own way copies them through an archive) and come out on the CPU.

    Tensors that share memory still share it on the other side. And functions keep the name of their file, which cloudpickle
    drops: messages must name the learner's own line.
    """

    def __init__(self, stream):
        super().__init__(stream, protocol=5)
        self._memories: dict[int, _Memory] = {}

    def reducer_override(self, obj):
        if type(obj) is types.CodeType:
            _, fields = cloudpickle.cloudpickle._code_reduce(obj)
            return _code, (obj.co_filename, *fields)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and obj.__name__ in sys.modules:
            return importlib.import_module, (obj.__name__,)  # a module that is an object of its own class, such as torch.backends
        if type(obj) is torch.Tensor and _is_plain(obj):
            storage = obj.untyped_storage()
            memory = self._memories.setdefault(storage._cdata, _Memory(storage))
            return _tensor, (memory, obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride(), obj.requires_grad)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type not in ("cpu", "meta"):
            return obj.cpu().__reduce_ex__(5)
        return super().reducer_override(obj)


class _Memory:
    """The bytes behind one or more tensors: a storage while packing, a flat uint8 tensor once unpacked."""

    def __init__(self, storage):
        self.storage = storage

    def __reduce__(self):
        flat = torch.empty(0, dtype=torch.uint8).set_(self.storage.cpu())
        return _memory, (pickle.PickleBuffer(flat.numpy()),)


def _memory(data) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).clone() if len(data) else torch.empty(0, dtype=torch.uint8)


def _tensor(memory: torch.Tensor, dtype, offset, shape, stride, requires_grad) -> torch.Tensor:
    x = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, stride)
    return x.requires_grad_(requires_grad)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether strides over bytes are all there is to the tensor."""
    plain = x.layout is torch.strided and x.device.type in ("cpu", "cuda") and not x.is_quantized and not x.__dict__
    return plain and not x.is_conj() and not x.is_neg()


def _code(file: str, *fields) -> types.CodeType:
    return types.CodeType(*fields).replace(co_filename=file)


def _dumps(value) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def _modules_of(program) -> list[str]:
    """The modules the program was written in, which a rank may not be able to import as they are now."""
    found, todo = [], [program]
    while todo:
        item = todo.pop()
        if isinstance(item, functools.partial):
            todo += [item.func]
            continue
        item = getattr(item, "__func__", item)
        found.append(getattr(item, "__module__", None) or type(item).__module__)
        if not hasattr(item, "__code__") and not isinstance(item, type):
            found.append(type(item).__module__)
        if hasattr(item, "__wrapped__"):
            todo.append(item.__wrapped__)
    return [name for name in dict.fromkeys(found) if name in sys.modules and _is_learners(sys.modules[name])]


def _is_learners(module) -> bool:
    """Whether the module is neither this library, nor Python's, nor installed."""
    name = module.__name__
    if name in ("__main__", "builtins") or name.partition(".")[0] in ("fourwalls", *sys.builtin_module_names):
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    paths = sysconfig.get_paths()
    installed = [paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    file = os.path.abspath(file)
    return not any(file.startswith(os.path.abspath(p) + os.sep) for p in installed) and "site-packages" not in file


class _by_value:
    """Within the block, these modules' functions and classes are sent themselves."""

    def __init__(self, names: list[str]):
        self.names = [n for n in names if n not in cloudpickle.list_registry_pickle_by_value()]

    def __enter__(self):
        for name in self.names:
            cloudpickle.register_pickle_by_value(sys.modules[name])

    def __exit__(self, *_):
        for name in self.names:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


def _culprit(program, args, kwargs, error) -> str:
    for where, value in [("program", program), *((f"argument {i}", v) for i, v in enumerate(args, 1)), *kwargs.items()]:
        if isinstance(value, PerRank):
            continue
        try:
            _dumps(value)
        except Exception as own:
            inside = _first_global(value) if where == "program" else _first_bad(value)
            named = f", because of {inside}" if inside else ""
            return f"{where} cannot be sent to the ranks{named}: {_reason(own)}. Make it inside the program instead"
    return f"the program and its arguments cannot be sent to the ranks: {_reason(error)}"


def _first_global(program) -> str | None:
    """The name of the first global or closed-over variable of a function that does not pickle."""
    inner = getattr(program, "func", program)
    code = getattr(inner, "__code__", None)
    if code is None:
        return None
    names = {n: inner.__globals__[n] for n in code.co_names if n in inner.__globals__}
    names |= {n: c.cell_contents for n, c in zip(code.co_freevars, inner.__closure__ or (), strict=True) if _filled(c)}
    return next((f"{name} ({type(value).__name__})" for name, value in names.items() if not _travels(value)), None)


def _first_bad(value, depth: int = 3) -> str | None:
    """The first part of a nested value that does not pickle, as `[2]['model'] (generator)`."""
    if isinstance(value, Mapping):
        items = [(f"[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"[{i}]", v) for i, v in enumerate(value)]
    else:
        return None
    for where, item in items if depth else []:
        if not _travels(item):
            deeper = _first_bad(item, depth - 1)
            return where + deeper if deeper and deeper.startswith("[") else f"{where} ({type(item).__name__})"
    return None


def _filled(cell) -> bool:
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False


def _travels(value) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
