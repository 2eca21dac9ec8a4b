"""Makes a student's copy of a lab, and proves that no answer is in it.

Solutions stand between markers in the source (nbgrader's own) and are replaced; outputs, attachments and foreign metadata are
dropped; the class's twist is written into the one cell that asks for it. The proof looks for what must not be there in the whole
text of the copy: lines of solutions and of the checks, whatever their spaces, and inside base64 too.

    released = given cells + stubs + test cells,     leaks = lines of solutions or checks found anywhere in it

Reference: nbgrader documentation, "Creating and grading assignments".
"""

import base64
import json
import re
from pathlib import Path

__all__ = ["BEGIN", "END", "Unmarked", "find_leaks", "secret_lines", "student_copy"]

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
CODE_STUB, TEXT_STUB = ("# YOUR CODE HERE", "raise NotImplementedError()"), "YOUR ANSWER HERE"
TELLING = 12  # characters of a line, spaces left out, below which it could stand anywhere
KEPT_METADATA = {"kernelspec", "language_info"}


class Unmarked(ValueError):
    """A source from which no copy can be made: what is wrong, and in which cell."""


def student_copy(source: dict, *, twist: int | None = None) -> dict:
    """The notebook without solutions. Raises Unmarked for a solution cell without markers, an id twice, a test without points."""
    copied, seen = json.loads(json.dumps(source)), set()
    copied["metadata"] = {key: value for key, value in copied.get("metadata", {}).items() if key in KEPT_METADATA}
    for cell in copied["cells"]:
        mark = cell.get("metadata", {}).get("nbgrader") or {}
        name = mark.get("grade_id", "")
        text = "".join(cell["source"])
        if mark and (not name or name in seen):
            raise Unmarked(f"cell {name!r}: every nbgrader cell needs an id of its own")
        seen.add(name)
        if mark.get("grade") and not mark.get("points"):
            raise Unmarked(f"cell {name!r} is graded and has no points")
        if mark.get("solution") and BEGIN not in text:
            raise Unmarked(f"cell {name!r} is a solution without {BEGIN} and {END}")
        if not mark.get("solution") and (BEGIN in text or END in text):
            raise Unmarked(f"cell {name!r} has a solution and is not marked as one")
        cell["source"] = _twisted(_stubbed(text, cell["cell_type"], name), twist)
        cell["metadata"] = {"nbgrader": mark} if mark else {}
        cell.pop("attachments", None)
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return copied


def secret_lines(source: dict, *modules: Path) -> dict[str, str]:
    """What must not be in a copy: telling line, without spaces -> where it comes from. modules: files of hidden checks."""
    found, given = {}, set()
    for cell in source["cells"]:
        text, mark = "".join(cell["source"]), cell.get("metadata", {}).get("nbgrader") or {}
        inside = "\n".join(re.findall(f"{BEGIN}(.*?){END}", text, flags=re.S))
        for line in inside.splitlines():
            _note(found, line, f"the solution of {mark.get('grade_id')}")
        given |= {_bare(line) for line in re.sub(f"{BEGIN}.*?{END}", "", text, flags=re.S).splitlines()}
    for path in modules:
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith(("import ", "from ", '"""', "#")):
                _note(found, line, f"the checks in {path.name}")
    return {line: where for line, where in found.items() if line not in given}


def find_leaks(copied: dict, secrets: dict[str, str]) -> list[str]:
    """Where a secret line stands in the copy: in cells, outputs, metadata or attachments, also as base64. [] if nowhere."""
    texts = [_bare(text) for text in _texts(copied)]
    return sorted({where for line, where in secrets.items() if any(line in text for text in texts)})


def _texts(node):
    """Every text in the notebook, and what it says if it is base64."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _texts(key)
            yield "".join(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else ""
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
    elif isinstance(node, str):
        yield node
        for word in re.findall(r"[A-Za-z0-9+/=]{24,}", node):
            try:
                yield base64.b64decode(word, validate=True).decode(errors="ignore")
            except ValueError:
                continue


def _note(found, line, where):
    bare = _bare(line)
    if len(bare) >= TELLING and not bare.startswith("#"):
        found.setdefault(bare, where)


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _stubbed(text, kind, name):
    if text.count(BEGIN) != text.count(END):
        raise Unmarked(f"cell {name!r}: {BEGIN} and {END} do not match")
    if kind != "code":
        return TEXT_STUB if BEGIN in text else text
    stub = r"\n".join(rf"\g<1>{line}" for line in CODE_STUB)
    return re.sub(rf"^([ \t]*){BEGIN}.*?{END}[^\n]*", stub, text, flags=re.M | re.S)


def _twisted(text, twist):
    return text if twist is None else re.sub(r"(fw\.lab\([^)]*twist=)None", rf"\g<1>{int(twist)}", text)
