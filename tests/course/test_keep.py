"""What the learner wrote comes back as it was, alone and complete, or is refused with the name of what is in the way."""

import linecache
import os

import cloudpickle
import pytest
import torch

from fourwalls.course.keep import keep, kept, source_of

NUMBER = [0]


def cell(source, scope=None):
    """Run `source` as a notebook cell does: names in __main__, source findable by inspect."""
    NUMBER[0] += 1
    name = f"<cell {NUMBER[0]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = {"__name__": "__main__"} if scope is None else scope
    exec(compile(source, name, "exec"), scope)
    return scope


SETUP = """
import torch
import numpy as np
import torch.nn.functional as F
from math import ceil as up
SCALE = {"a": (1, 2.5), "b": [None, True]}
KIND = torch.float64
x = torch.ones(3)

def helper(n, step=SCALE):
    return up(n) + len(step)

class Box:
    size = helper(1.5)
    def open(self):
        return np.int64(self.size)
"""


def test_imports_constants_helpers_and_classes_come_along(project, capsys):
    scope = cell(SETUP)
    cell(
        "def my_ring(comm, x, *, op: str = 'sum'):\n    x = F.relu(x.to(KIND))\n    return x + Box().open() + helper(0.5)", scope
    )
    assert keep(scope["my_ring"]) is scope["my_ring"]
    assert capsys.readouterr().out == "Kept my_ring in my/kept/my_ring.py.\n"
    text = (project / "my" / "kept" / "my_ring.py").read_text()
    assert (
        "import torch.nn.functional as F" in text
        and "from math import ceil as up" in text
        and "from torch import float64 as KIND" in text
    )
    assert text.index("SCALE =") < text.index("def helper") < text.index("class Box") < text.index("def my_ring")
    assert "torch.ones" not in text, "the parameter x is not the notebook's x"
    mine = kept("my_ring", default=None)
    assert capsys.readouterr().out == "Using your my_ring.\n"
    assert mine is not scope["my_ring"]
    assert torch.equal(mine(None, torch.ones(2)), scope["my_ring"](None, torch.ones(2)))


def test_recursion_inner_functions_and_the_decorator_itself(project, capsys):
    scope = cell(SETUP)
    scope["keep"] = keep
    cell("@keep\ndef fact(n):\n    def less(m): return fact(m - 1)\n    return 1 if n < 2 else n * less(n)", scope)
    assert "@" not in (project / "my" / "kept" / "fact.py").read_text()
    assert kept("fact", None)(5) == 120


def test_the_newest_version_counts(project):
    scope = cell("def f(): return 1")
    keep(scope["f"])
    cell("def f(): return 2", scope)
    keep(scope["f"])
    assert kept("f", None)() == 2
    assert sorted(os.listdir(project / "my" / "kept")) == ["earlier", "f.py"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(a): return a + x", "it uses x, a Tensor of this notebook"),
        ("def f(a): return missing(a)", "f uses missing, which is not defined"),
        ("f = lambda a: a", "lambda"),
        ("def outer():\n    z = 3\n    def f(a): return a + z\n    return f\nf = outer()", "f uses z of the function around it"),
        ("f = Box", "written with def"),
        ("f = 3", "written with def"),
        ("import functools\nf = functools.partial(helper, 1)", "written with def"),
        ("one = helper\ndef f(a): return one(a)", "one is another name of helper"),
        ("bad = float('nan')\ndef f(a): return a + bad", "it uses bad, a float"),
        ("exec('def hidden(a): return a')\ndef f(a): return hidden(a)", "the source of hidden is not known"),
    ],
)
def test_what_cannot_stand_alone_is_refused_by_name(project, source, words):
    scope = cell(SETUP)
    cell(source, scope)
    with pytest.raises(ValueError, match=words):
        keep(scope["f"])
    assert not (project / "my" / "kept").exists()


def test_what_fails_when_loaded_alone_is_refused_and_the_earlier_version_stays(project, monkeypatch):
    keep(cell("def f(): return 1")["f"])
    monkeypatch.setenv("FOURWALLS_TEST_STEP", "3")
    scope = cell("import os\ndef f(step=os.environ['FOURWALLS_TEST_STEP']): return step")
    monkeypatch.delenv("FOURWALLS_TEST_STEP")
    with pytest.raises(ValueError, match="on its own it fails with KeyError"):
        keep(scope["f"])
    assert kept("f", None)() == 1 and os.listdir(project / "my" / "kept") == ["f.py"]


def test_nothing_kept_means_the_reference(project, capsys):
    assert kept("my_ring", default=len) is len
    assert capsys.readouterr().out == "No my_ring kept yet: using the reference.\n"


@pytest.mark.parametrize("text", ["def f(:", "raise KeyError('x')", "g = 3", "import nothing_like_this"])
def test_a_broken_file_is_named_and_the_reference_used(project, capsys, text):
    (project / "my" / "kept").mkdir()
    (project / "my" / "kept" / "f.py").write_text(text)
    assert kept("f", default=len) is len
    out = capsys.readouterr().out
    assert out.startswith("Your f does not load (") and out.endswith(": using the reference.\n")


@pytest.mark.parametrize("name", ["../f", "a.b", "", "def", "f.py", None])
def test_only_names_of_functions_are_looked_up(project, name):
    with pytest.raises(ValueError, match="name"):
        kept(name, default=None)


def test_a_kept_function_travels_by_value_and_errors_show_its_line(project):
    scope = cell("def f(a):\n    return 1 / a")
    keep(scope["f"])
    mine = kept("f", None)
    assert b"1 / a" not in cloudpickle.dumps(mine) and len(cloudpickle.dumps(mine)) > 200, "by value: code, not a name to import"
    assert "fourwalls" not in mine.__globals__["__name__"], "call sites must count it as the learner's code"
    with pytest.raises(ZeroDivisionError) as caught:
        mine(0)
    last = caught.traceback[-1].frame.code.raw
    assert last.co_filename == "my/kept/f.py" and "1 / a" in "".join(linecache.getlines("my/kept/f.py"))


def test_a_kept_function_can_lean_on_an_earlier_kept_one(project):
    keep(cell("def f(a):\n    return a + 1")["f"])
    scope = cell("def g(a):\n    return f(a) * 2", {"__name__": "__main__", "f": kept("f", None)})
    keep(scope["g"])
    assert kept("g", None)(1) == 4


def test_outside_my_it_lasts_as_long_as_the_process_and_leaves_nothing(project, monkeypatch, capsys):
    monkeypatch.chdir(project / "notebooks")
    keep(cell("def f(): return 5")["f"])
    assert capsys.readouterr().out == "Kept f. Not running inside my/: this lasts until the kernel stops.\n"
    assert kept("f", None)() == 5
    assert list((project / "my").iterdir()) == [] and list((project / "notebooks").iterdir()) == []


def test_source_of_is_the_same_every_time():
    scope = cell(SETUP + "\ndef f(a): return helper(a) + np.int64(up(a))")
    assert source_of(scope["f"]) == source_of(scope["f"])


def test_an_earlier_version_is_set_aside(project, capsys):
    one, two = (cell(f"def answer():\n    return {k}")["answer"] for k in (1, 2))
    keep(one)
    keep(one)
    assert "earlier" not in capsys.readouterr().out  # the same text: nothing to set aside

    keep(two)
    assert "The version before is my/kept/earlier/answer_1.py" in capsys.readouterr().out
    assert "return 1" in (project / "my" / "kept" / "earlier" / "answer_1.py").read_text()
    assert kept("answer", None)() == 2
