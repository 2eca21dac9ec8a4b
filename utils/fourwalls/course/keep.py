"""What the learner wrote goes on to be used: `keep(my_ring)` writes it to `my/kept/my_ring.py`, and later ones load it.

A function of a notebook leans on other names of it: imports, helpers, constants. Those that the source really refers to are
written along; what cannot be written as source (a tensor, a model, a value captured from an enclosing function) is refused by
name.

    kept file = imports + constants + helpers + the function, in an order that runs

Reference: Python's `symtable`, which tells the global names of a piece of source without running it.
"""

import ast
import builtins
import importlib
import inspect
import keyword
import linecache
import os
import symtable
import tempfile
import textwrap
import types

from .home import find_home
from .progress import remember_place

__all__ = ["keep", "kept", "source_of"]

PLAIN = (int, float, complex, str, bytes, bool, type(None))
MODULE = "my.kept."  # not in sys.modules: cloudpickle then sends such functions to the ranks by value


def keep(function):
    """Write `function` to `my/kept/NAME.py` and return it, so it can also be used as a decorator.

    A version kept before that differs is moved to `my/kept/earlier/`, never lost.
    Raises ValueError, naming what is in the way, where it cannot be written as source that stands alone.
    """
    text = source_of(function)
    name, home = function.__name__, find_home()
    folder = home.path / "kept"
    path = folder / f"{name}.py"
    compile(text, str(path), "exec")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".keeping_", suffix=".py")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            _try_alone(temporary, name)
            earlier = _set_aside(path, text)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ValueError(f"cannot keep {name}: {error.strerror} ({folder.name}/)") from None
    remember_place()
    before = f" The version before is my/kept/earlier/{earlier.name}." if earlier else ""
    print(f"Kept {name}" + (f" in my/kept/{name}.py.{before}" if home.lasting else f". {home.note}"))
    return function


def _set_aside(path, text: str):
    """Move a kept version whose text is another to earlier/NAME_k.py; gives back its new path, or None if there was none."""
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace") == text:
        return None
    folder = path.parent / "earlier"
    folder.mkdir(exist_ok=True)
    number = 1
    while (place := folder / f"{path.stem}_{number}.py").exists():
        number += 1
    os.replace(path, place)
    return place


def _try_alone(path, name: str) -> None:
    """Load the text once: nothing of this kernel will be there when a later notebook does."""
    try:
        _load(path, name)
    except Exception as error:
        raise ValueError(f"cannot keep {name}: on its own it fails with {type(error).__name__}: {error}") from None


def kept(name: str, default):
    """The learner's function `name` if one was kept and loads, else `default`; says which one it is.

    Runs the file my/kept/NAME.py and nothing else. Raises ValueError where `name` is no name of a function.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is not a function's name; write it as in keep, e.g. 'my_ring'")
    path = find_home().path / "kept" / f"{name}.py"
    if not path.is_file():
        print(f"No {name} kept yet: using the reference.")
        return default
    try:
        function = _load(path, name)
    except Exception as error:  # the learner may have edited the file
        print(f"Your {name} does not load ({type(error).__name__}: {error}): using the reference.")
        return default
    print(f"Using your {name}.")
    return function


def source_of(function) -> str:
    """`function` and all it leans on as the text of a module. Raises ValueError with the name of what cannot be written."""
    if not isinstance(function, types.FunctionType):
        raise ValueError(f"keep takes a function written with def, not {type(function).__name__}")
    if function.__name__ == "<lambda>":
        raise ValueError("a lambda has no name to keep it under; write it with def")
    found = _Found(function.__name__)
    found.add(function.__name__, function)
    imports = "\n".join(sorted(found.imports))
    parts = [
        f'"""{function.__name__}, written by you and kept with fw.keep."""',
        imports,
        "\n".join(found.constants),
        *found.definitions,
    ]
    return "\n\n\n".join(part for part in parts if part) + "\n"


class _Found:
    """Collects imports, constants and definitions, those leaned on before those that lean."""

    def __init__(self, root: str):
        self.root, self.imports, self.constants, self.definitions = root, set(), [], []
        self._names: dict[str, object] = {}

    def add(self, name: str, value) -> None:
        """Make `name` stand for `value` in the module."""
        if name in self._names:
            if self._names[name] is not value:
                raise ValueError(f"cannot keep {self.root}: {name} means two different things in what it uses; rename one")
            return
        self._names[name] = value
        if isinstance(value, types.ModuleType):
            self.imports.add(f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}")
        elif isinstance(value, (types.FunctionType, type)) and _is_mine(value):
            self._add_definition(name, value)
        elif _home_of(value, name):
            module, original = _home_of(value, name)
            self.imports.add(f"from {module} import {original}" + ("" if original == name else f" as {name}"))
        elif _is_plain(value):
            self.constants.append(f"{name} = {value!r}")
        else:
            raise ValueError(
                f"cannot keep {self.root}: it uses {name}, a {type(value).__name__} of this notebook. "
                "Pass it as an argument, or make it inside the function."
            )

    def _add_definition(self, name: str, value) -> None:
        if isinstance(value, types.FunctionType) and value.__closure__:
            inner = ", ".join(value.__code__.co_freevars)
            raise ValueError(f"cannot keep {self.root}: {name} uses {inner} of the function around it; pass it as an argument")
        if value.__name__ != name:
            raise ValueError(f"cannot keep {self.root}: {name} is another name of {value.__name__}; use that name")
        try:
            text = _source(value)
            tree = ast.parse(text)
        except (OSError, TypeError, SyntaxError):
            why = f"the source of {name} is not known; run the cell that defines it again"
            raise ValueError(f"cannot keep {self.root}: {why}") from None
        if len(tree.body) != 1 or getattr(tree.body[0], "name", None) != name:
            raise ValueError(f"cannot keep {self.root}: {name} must be written with def or class on lines of its own")
        text = _without_keep(text, tree.body[0], value)
        scope = value.__globals__ if isinstance(value, types.FunctionType) else _globals_of_class(value)
        for used in _global_names(text, name):
            if used in scope:
                self.add(used, scope[used])
            elif not hasattr(builtins, used):
                raise ValueError(f"cannot keep {self.root}: {name} uses {used}, which is not defined in this notebook")
        self.definitions.append(text.rstrip())


def _source(value) -> str:
    """The text of a function or class. A class of a notebook has no file of its own: it is found by one of its methods."""
    if isinstance(value, types.FunctionType):
        return textwrap.dedent(inspect.getsource(value))
    for member in vars(value).values():
        if isinstance(member, types.FunctionType):
            cell = "".join(linecache.getlines(member.__code__.co_filename))
            for node in ast.parse(cell).body if cell else ():
                if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    return "".join(cell.splitlines(keepends=True)[first - 1 : node.end_lineno])
    raise OSError(f"no source for {value.__name__}")


def _global_names(text: str, name: str) -> list[str]:
    """The global names that the definition `text` of `name` refers to, in body, defaults, decorators and annotations."""
    found = set()

    def visit(table, outermost):
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or outermost):
                found.add(symbol.get_name())
        for child in table.get_children():
            visit(child, False)

    visit(symtable.symtable(text, "<kept>", "exec"), True)
    return sorted(found - {name})


def _without_keep(text: str, node, value) -> str:
    """The source without a decorator that is `keep` itself."""
    scope = getattr(value, "__globals__", {})
    drop = set()
    for decorator in getattr(node, "decorator_list", []):
        last = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
        if last == "keep" or scope.get(last) is keep:
            drop |= set(range(decorator.lineno, decorator.end_lineno + 1))
    return "\n".join(line for k, line in enumerate(text.splitlines(), 1) if k not in drop)


def _is_mine(value) -> bool:
    """Whether it was defined in the notebook or script itself, or was kept earlier: nothing to import it from."""
    module = getattr(value, "__module__", None) or ""
    return module in ("__main__", "builtins.__main__") or module.startswith(MODULE)


def _home_of(value, name: str) -> tuple[str, str] | None:
    """(module, name there) of something that another module offers, or None."""
    module, original = (
        getattr(value, "__module__", None),
        getattr(value, "__qualname__", None) or getattr(value, "__name__", None),
    )
    if str(value).startswith("torch.") and str(value).count(".") == 1:  # torch.float32 and its like know no module
        module, original = "torch", str(value).partition(".")[2]
    if (
        not isinstance(module, str)
        or not isinstance(original, str)
        or module in ("__main__", "builtins")
        or not original.isidentifier()
    ):
        return None
    try:
        offered = getattr(importlib.import_module(module), original, None)
    except ImportError:
        return None
    return (module, original) if offered is value else None


def _is_plain(value) -> bool:
    """Whether `repr` gives source for exactly this value."""
    if isinstance(value, (tuple, list, set, frozenset)) and type(value) in (tuple, list, set):
        return len(value) > 0 and all(_is_plain(v) for v in value) or type(value) in (tuple, list)
    if type(value) is dict:
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in PLAIN and repr(value) not in ("nan", "inf", "-inf")


def _globals_of_class(value) -> dict:
    """The names around a class: those of one of its functions, else of the notebook."""
    for member in vars(value).values():
        if isinstance(member, types.FunctionType):
            return member.__globals__
    import __main__

    return vars(__main__)


def _load(path, name: str):
    """Run one kept file in a module of its own and return its function `name`."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    shown = f"my/kept/{name}.py"
    module = types.ModuleType(MODULE + name)
    module.__file__ = str(path)
    linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)  # so that errors show the line
    exec(compile(text, shown, "exec"), module.__dict__)
    function = module.__dict__.get(name)
    if not callable(function):
        raise ValueError(f"the file defines no function {name}")
    return function
