"""The committed notebooks: executed in order, light, in small cells, and free of what belongs to one machine."""

import ast
import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MOST_BYTES, MOST_LINES, MEDIAN_LINES = 300_000, 40, 10
GROWING = ("append", "extend", "insert", "add", "update", "add_", "sub_", "mul_", "div_", "pop", "remove")
LOCAL = re.compile(r"/(?:home|Users|root|tmp|work|mnt|var/folders)/|[A-Z]:\\\\|file://|(?:127\.0\.0\.1|localhost):\d+")


def faults(name, text):
    """Everything that is wrong with the notebook `name` whose JSON is `text`, in words."""
    book = json.loads(text)
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    lengths = [len(source.splitlines()) for source in sources if source.strip()]
    said = []
    if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", name):
        said.append(f"the name {name} is not NN_topic.ipynb")
    if len(text.encode()) >= MOST_BYTES:
        said.append(f"{len(text.encode())} bytes")
    counts = [cell.get("execution_count") for cell in code]
    if counts != list(range(1, len(code) + 1)):
        said.append(f"execution counts {counts} are not 1 to {len(code)}")
    said += [f"code cell {i} has {n} lines" for i, n in enumerate(lengths) if n > MOST_LINES]
    if lengths and statistics.median(lengths) > MEDIAN_LINES:
        said.append(f"the median code cell has {statistics.median(lengths)} lines")
    for i, (cell, source) in enumerate(zip(code, sources, strict=True)):
        tags = cell["metadata"].get("tags", [])
        shows_error = any(output["output_type"] == "error" for output in cell["outputs"])
        if shows_error and "raises-exception" not in tags:
            said.append(f"code cell {i} shows an error")
        said += [f"code cell {i}: {word}" for word in unsafe(source) + grows(source)]
    ids = [cell.get("id") for cell in book["cells"]]
    if None in ids or len(set(ids)) < len(ids):
        said.append("cell ids are missing or repeated")
    if book["metadata"].get("kernelspec", {}).get("name") != "python3":
        said.append("the kernel is not python3")
    if "widgets" in book["metadata"]:
        said.append("widget state is stored")
    without_pictures = re.sub(r'"image/png": "[^"]*"', "", text)
    said += [f"local: {found}" for found in sorted(set(LOCAL.findall(without_pictures)))]
    if "29500" in without_pictures:
        said.append("the fixed port 29500")
    return said


def grows(source):
    """Trial a29: what a cell would have twice if it were run twice, since it adds to what another cell has made."""
    try:
        statements = tree_of(source).body
    except SyntaxError:
        return []
    found, own = [], set()
    for statement in statements:
        value, changed = getattr(statement, "value", None), set()
        if isinstance(statement, ast.AugAssign):
            changed = {first_name(statement.target)}
        elif isinstance(statement, ast.Assign) and isinstance(value, ast.BinOp):
            read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
            changed = read & {first_name(target) for target in statement.targets}
        elif isinstance(statement, ast.Expr) and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            changed = {first_name(value.func)} if value.func.attr in GROWING else set()
        found += [f"adds to {name}, which another cell has made" for name in sorted(changed - own - {""})]
        own |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {getattr(statement, "name", "")}
    return found


def first_name(node):
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def tree_of(source):
    """One cell's source, without its magics."""
    return ast.parse("\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines()))


def unsafe(source):
    """torch.load that would run what a file says, in one cell's source. Magics are left out of the look."""
    try:
        tree = tree_of(source)
    except SyntaxError:
        return ["is not Python"] if not source.startswith("%%") else []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if given.get("weights_only", "True") != "True":
                found.append("torch.load(weights_only=False)")
    return found


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path):
    assert faults(path.name, path.read_text(encoding="utf-8")) == []


def test_numbers_are_not_used_twice():
    numbers = [path.name[:2] for path in NOTEBOOKS]
    assert len(numbers) == len(set(numbers))


def book(*sources, **change):
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source, "outputs": [], "execution_count": i + 1}
        for i, source in enumerate(sources)
    ]
    notebook = {"cells": cells, "metadata": {"kernelspec": {"name": "python3"}}, "nbformat": 4, "nbformat_minor": 5}
    for where, value in change.items():
        cells[0][where] = value
    return notebook


ERROR = [{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]


@pytest.mark.parametrize(
    ("name", "notebook", "says"),
    [
        ("00_fine.ipynb", book("x = 1", "%time x", "!ls"), None),
        ("00_fine.ipynb", book("1 / 0", outputs=ERROR, metadata={"tags": ["raises-exception"]}), None),
        ("00_fine.ipynb", book("\n".join(["x"] * 40), "y", "z"), None),
        ("fine.ipynb", book("x"), "not NN_topic"),
        ("00_fine.ipynb", book("x", execution_count=None), "execution counts [None]"),
        ("00_fine.ipynb", book("x", execution_count=7), "execution counts [7]"),
        ("00_fine.ipynb", book("\n".join(["x"] * 41), "y", "z"), "code cell 0 has 41 lines"),
        ("00_fine.ipynb", book("\n".join(["x"] * 11)), "median code cell has 11 lines"),
        ("00_fine.ipynb", book("x", outputs=ERROR), "code cell 0 shows an error"),
        ("00_fine.ipynb", book("x", id=None), "cell ids"),
        ("00_fine.ipynb", book("x", "y", id="c1"), "cell ids"),
        ("00_fine.ipynb", book("x = '/home/me/x'"), "local: /home/"),
        ("00_fine.ipynb", book("x = 'http://localhost:8888'"), "local: localhost:8888"),
        ("00_fine.ipynb", book("port = 29500"), "29500"),
        ("00_fine.ipynb", book("torch.load(f, weights_only=False)"), "torch.load"),
        ("00_fine.ipynb", book("torch.load(f,\n  weights_only=flag)"), "torch.load"),
        ("00_fine.ipynb", book("x ="), "is not Python"),
        ("00_fine.ipynb", book("x = 1\nx += 1\nx = x + 1\nxs = []\nxs.append(x)", "for k in range(3):\n    y = k"), None),
        ("00_fine.ipynb", book("x = 1", "x += 1"), "code cell 1: adds to x"),
        ("00_fine.ipynb", book("x = 1", "x = 2 * x"), "code cell 1: adds to x"),
        ("00_fine.ipynb", book("xs = [1]", "xs[0] += 1"), "code cell 1: adds to xs"),
        ("00_fine.ipynb", book("xs = []", "xs.append(1)"), "code cell 1: adds to xs"),
        ("00_fine.ipynb", book("x = '" + "y" * 300_000 + "'"), "bytes"),
        ("00_fine.ipynb", {**book("x"), "metadata": {"kernelspec": {"name": "venv"}}}, "kernel is not python3"),
        ("00_fine.ipynb", {**book("x"), "metadata": {"kernelspec": {"name": "python3"}, "widgets": {}}}, "widget state"),
    ],
)
def test_a_fault_is_seen(name, notebook, says):
    found = faults(name, json.dumps(notebook))
    assert (found == []) if says is None else any(says in word for word in found), found
