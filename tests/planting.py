"""Faults planted in the library's own text, for tests that prove that a check can fail."""

import inspect
import types

__all__ = ["planted"]


def planted(module, old, new, **names):
    """A copy of `module` with `old`, which its text has once, replaced by `new`; `names` are put in place of its own."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, (module.__name__, text.count(old), old)
    copy = types.ModuleType(module.__name__)
    copy.__package__ = module.__package__
    exec(compile(text.replace(old, new), module.__file__, "exec"), copy.__dict__)
    copy.__dict__.update(names)
    return copy
