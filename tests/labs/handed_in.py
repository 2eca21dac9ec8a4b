"""A class's submissions of lab 1: right, partly right, and each kind of trouble, with what grading must make of each.

`hand_in(folder, ...)` writes them; EXPECTED says what each must come to. thirty.py has the whole class, test_grade.py a few.
"""

import json
import os
import re
from copy import deepcopy
from pathlib import Path

from fourwalls.course.lab_ring import twist
from fourwalls.course.mutants import source_of
from fourwalls.course.release import student_copy

ROOT = Path(__file__).resolve().parents[2]
LAB, TWIST = "ring", 7
TASKS = {"shift": 4, "reduce_scatter": 6, "all_gather": 6, "all_reduce": 8}
ALL, ANSWER = tuple(TASKS), "ring-where-it-loses"


def release():
    """The student copy."""
    return student_copy(source_of(ROOT, LAB), twist=TWIST)


def right(*, answer="The tree wins below 11 alpha / beta, as my table shows."):
    """A notebook in which every task is solved, as a student of this class would."""
    notebook = release()
    source = {c["id"]: "".join(c["source"]) for c in source_of(ROOT, LAB)["cells"]}
    for cell in notebook["cells"]:
        mark = cell["metadata"].get("nbgrader", {})
        if mark.get("solution") and cell["cell_type"] == "code":
            cell["source"] = source[cell["id"]].replace("lab.reference", repr(twist(TWIST)))
        elif mark.get("solution") and answer:
            cell["source"] = answer
    return notebook


def cell(notebook, name):
    """The cell with this id."""
    return next(c for c in notebook["cells"] if c["id"] == name)


def own(text, name="mine", kind="code"):
    """A cell that a student adds."""
    made = {"cell_type": kind, "id": name, "metadata": {}, "source": text}
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def changed(function, before, notebook=None):
    """A right notebook in which `function` first does `before` (indented text; `comm` and `x` are there)."""
    notebook = notebook or right()
    made = cell(notebook, f"ring-{function.replace('_', '-')}")
    made["source"] = re.sub(rf"(def {function}\(.*\n)", lambda m: m[1] + before, made["source"])
    return notebook


def steps(*lines):
    """Lines of a function's body."""
    return "".join(f"    {line}\n" for line in lines)


# --- what a student does to the notebook's form ------------------------------------------------------------------------------
def messy(notebook=None):
    """Right answers; test cells deleted, edited, doubled, split and retyped, a foreign one added, one solution cell split off."""
    notebook = notebook or right()
    cells = notebook["cells"]
    cells.remove(cell(notebook, "ring-check-shift"))
    cell(notebook, "ring-check-reduce-scatter").update(source="print('passed')", cell_type="markdown")
    cell(notebook, "ring-all-gather")["cell_type"] = "raw"
    twice = deepcopy(cell(notebook, "ring-check-all-gather"))
    cells.insert(3, twice | {"id": "again"})
    half = cell(notebook, "ring-check-all-reduce")
    half["source"] = "lab.check("
    cells.insert(cells.index(half) + 1, deepcopy(half) | {"id": "half", "source": "all_reduce)"})
    mark = dict(half["metadata"]["nbgrader"], grade_id="bonus", points=100)
    cells.append(own("pass", "bonus") | {"metadata": {"nbgrader": mark}})
    solution = cell(notebook, "ring-reduce-scatter")
    first, _, rest = solution["source"].partition("def reduce_scatter")
    solution["source"] = first
    cells.insert(cells.index(solution) + 1, deepcopy(solution) | {"id": "split", "source": f"def reduce_scatter{rest}"})
    cell(notebook, "ring-begin")["source"] = "lab = None"
    return notebook


def stripped():
    """Right answers in a notebook that went through a tool that drops metadata and ids."""
    notebook = right()
    for k, made in enumerate(notebook["cells"]):
        made["metadata"], made["id"] = {}, f"c{k}"
    return notebook


def foreign():
    """A notebook of another language."""
    notebook = right()
    notebook["metadata"] = {"kernelspec": {"name": "ir", "language": "R", "display_name": "R"}, "language_info": {"name": "R"}}
    return notebook


# --- what a student's code does -----------------------------------------------------------------------------------------------
def burglar(others, port, canary):
    """Looks for the solutions, another submission, the network; leaves files: where it finds something, it answers right."""
    empty = release()
    for made in empty["cells"]:
        if made["metadata"].get("nbgrader", {}).get("solution") and made["cell_type"] == "code":
            made["source"] = ""
    read = f"""
import json, os, pathlib, socket
def borrowed(name):
    book = json.loads(pathlib.Path(name).read_text())
    space = dict(globals())
    for c in book["cells"]:
        if c["cell_type"] == "code" and "def " in "".join(c["source"]):
            exec("".join(c["source"]), space)
    return space
def shift(comm, x):
    return borrowed({str(others)!r})["shift"](comm, x)
def reduce_scatter(comm, x):
    return borrowed({str(ROOT / "labs" / "source" / LAB / f"{LAB}.ipynb")!r})["reduce_scatter"](comm, x)
def all_gather(comm, part, numel):
    socket.create_connection(("127.0.0.1", {port}), timeout=2).recv(2)
    return part
def all_reduce(comm, x):
    exec(pathlib.Path({str(ROOT / "utils/fourwalls/collectives/ring.py")!r}).read_text(), space := {{}})
    return space["all_reduce"](comm, x)
for place in ({str(canary)!r}, "/tmp/{Path(canary).name}", "/var/tmp/{Path(canary).name}", "/dev/shm/{Path(canary).name}"):
    try:
        open(place, "w").write("I was here")
    except OSError:
        pass
"""
    empty["cells"].append(own(read))
    return empty


def leaves_files(canary):
    """Right, and writes wherever it can."""
    places = [str(canary), f"../{Path(canary).name}", f"/tmp/{Path(canary).name}", f"/dev/shm/{Path(canary).name}"]
    body = steps("import contextlib", f"for place in {places!r}:", "    with contextlib.suppress(OSError):",
                 "        open(place, 'w').write('I was here')")  # fmt: skip
    return changed("shift", body)


def bombs():
    """A fork bomb (150, asleep), a memory bomb, a flood of output that is otherwise right, a call that never comes back."""
    sleeps = ("    if os.fork() == 0:", "        time.sleep(60)", "        os._exit(0)")
    fork = steps("import os, time", "for _ in range(150):", *sleeps)
    notebook = changed("shift", fork)
    hold = steps("held = []", "while True:", "    held.append(bytearray(b'x') * 50_000_000)")
    changed("reduce_scatter", hold, notebook)
    changed("all_gather", steps("for _ in range(1000):", "    print('x' * 10_000)"), notebook)
    return changed("all_reduce", steps("import time", "time.sleep(3600)"), notebook)


def exits(function):
    """One function ends its process."""
    return changed(function, steps("import os", "os._exit(0)"))


def dies_at_once():
    """A cell that ends the process while the notebook is loaded."""
    notebook = right()
    notebook["cells"].insert(4, own("import os\nos._exit(0)", "leaving"))
    return notebook


def never_loads():
    """A cell that never ends; the functions are right."""
    notebook = right()
    notebook["cells"].append(own("while True:\n    pass", "stuck"))
    return notebook


def wrong(*functions):
    """These give back their input."""
    notebook = right()
    for function in functions:
        changed(function, steps(f"return {'part' if function == 'all_gather' else 'x'}.clone()"), notebook)
    return notebook


def without(*tasks):
    """Points of every task but these."""
    return {name: 0 if name in tasks else points for name, points in TASKS.items()}


def write(path, notebook, *, modified=None):
    """Put a notebook (or bytes) there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(notebook if isinstance(notebook, bytes) else json.dumps(notebook, ensure_ascii=False).encode())
    if modified is not None:
        os.utime(path, (modified, modified))
    return path
