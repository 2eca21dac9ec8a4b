"""Puts a handed-in notebook back into the form of the release, and says what had to be done.

The test cells, and all that students were not to change, come from the release; what they wrote stays, in their order. A cell is
known by its nbgrader id, else by its cell id, else by what it says or defines, so that stripped metadata costs nobody a point.

    restored = the student's cells, each mark given once, + the release's locked cells, whole

Reference: nbgrader's OverwriteCells and DeduplicateIds, which find nothing more to do afterwards.
"""

import ast
import re

__all__ = ["restore"]

ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CURIOUS = re.compile(  # the stack, all objects, memory beside messages, what torch does not see
    r"\b(_getframe|currentframe|f_back|f_locals|get_objects|get_referrers|settrace|setprofile|meta_path|ctypes|mmap|shared_memory"
    r"|multiprocessing|_DisableTorchDispatch|_disable_current_modes|fourwalls\.course|_line\.ask)\b"
)


def restore(handed_in: dict, release: dict) -> tuple[dict, list[str]]:
    """(notebook of nbformat 4.5, notes). handed_in: as submissions.read gives it. release: the student copy of the lab."""
    originals = {_mark(cell)["grade_id"]: cell for cell in release["cells"] if _mark(cell).get("grade_id")}
    names, notes = _known(handed_in["cells"], originals), []
    cells, at = [], {}
    keeps = {name: _which(name, names, handed_in["cells"], original) for name, original in originals.items()}
    for k, (cell, name) in enumerate(zip(handed_in["cells"], names, strict=True)):
        if name is None or keeps[name] != k:
            if name is not None and not _mark(originals[name]).get("solution") and cell["source"] in originals[name]["source"]:
                continue  # a copy, or a piece, of what the release has whole
            if name is None and _mark(cell).get("grade"):
                notes.append(f"a test cell that is not ours ({str(_mark(cell).get('grade_id'))[:40]}) counts for nothing")
            cells.append(_plain(cell))
            continue
        made, said = _restored(cell, originals[name], names.count(name))
        notes += said
        at[name] = len(cells)
        cells.append(made)
    bare = [name for name, k in keeps.items() if k is not None and not _mark(handed_in["cells"][k])]
    if bare:
        more = " ..." if len(bare) > 3 else ""
        notes.append(f"{len(bare)} cells had lost their marks and were recognised: {', '.join(bare[:3])}{more}")
    notes += [f"cell {at_}: look at it, it uses {word}" for at_, word in _curious(cells)]
    _add_missing(cells, at, originals, notes)
    _number(cells)
    return {"cells": cells, "metadata": release["metadata"], "nbformat": 4, "nbformat_minor": 5}, notes


def _curious(cells):
    """[(name of a cell, a word in it)] that no task needs, and by which a process can be made to say other than what it did."""
    for k, cell in enumerate(cells):
        found = CURIOUS.search(cell["source"]) if cell["cell_type"] == "code" else None
        if found:
            yield cell.get("id") or k, found[0]


def _restored(cell, original, count):
    """(the release's cell with what the student wrote, what was found)."""
    mark, name, said = _mark(original), _mark(original)["grade_id"], []
    ours, own = "".join(original["source"]), cell["source"]
    made = {"cell_type": original["cell_type"], "metadata": {"nbgrader": dict(mark)}, "source": own, "id": name}
    what = "test cell" if mark.get("grade") and not mark.get("solution") else "cell"
    if count > 1:
        which = "all are run in order, the last is the answer" if mark.get("solution") else "restored once"
        said.append(f"{what} {name} was there {count} times: {which}")
    if cell["cell_type"] != original["cell_type"]:
        said.append(f"{what} {name} was made a {cell['cell_type']} cell: restored")
    if not mark.get("solution"):
        if own.strip() != ours.strip():
            said.append(f"{what} {name} was edited: restored, what was in it was not run")
        made["source"] = ours
    if _mark(cell) and any(_mark(cell).get(key) != mark.get(key) for key in ("grade", "solution", "points")):
        said.append(f"{what} {name} had another mark: restored")
    if original["cell_type"] == "markdown" and "attachments" in cell:
        made["attachments"] = cell["attachments"]
    return made, said


def _add_missing(cells, at, originals, notes):
    """Put locked and test cells that are gone behind the one that stands before them in the release. Changes `cells`, `notes`."""
    before = -1
    for name, original in originals.items():
        if name in at:
            before = max(before, at[name])
            continue
        mark = _mark(original)
        if mark.get("solution") and not mark.get("grade"):
            notes.append(f"cell {name} is missing: what it was to define is looked for elsewhere")
            continue
        what = "test cell" if not mark.get("solution") and mark.get("grade") else "cell"
        notes.append(f"{what} {name} was missing: put back")
        copied = {"cell_type": original["cell_type"], "metadata": {"nbgrader": dict(mark)}, "id": name}
        before += 1
        cells.insert(before, {**copied, "source": "".join(original["source"])})
        at.update({other: place + 1 for other, place in at.items() if place >= before})
        at[name] = before


def _which(name, names, cells, original):
    """Which of several cells of this name carries the mark: of answers the last that is one, of all others the first."""
    places = [k for k, other in enumerate(names) if other == name]
    if not places:
        return None
    if not _mark(original).get("solution"):
        return places[0]
    ours = "".join(original["source"]).strip()
    written = [k for k in places if cells[k]["source"].strip() not in ("", ours)]
    return (written or places)[-1]


def _known(cells, originals):
    """The release's name for each cell, or None: by mark, by cell id, by what it says, by what it defines."""
    names = [_mark(cell).get("grade_id") for cell in cells]
    names = [name if isinstance(name, str) and name in originals else None for name in names]
    for tell in (_by_id, _by_text, _by_definitions):
        for k, cell in enumerate(cells):
            if names[k] is None and not _mark(cell).get("grade_id"):
                found = tell(cell, originals)
                names[k] = found if found not in names else None
    return names


def _by_id(cell, originals):
    return cell.get("id") if cell.get("id") in originals else None


def _by_text(cell, originals):
    """A locked cell says the same as in the release; no other does (a stub that is found again is no answer)."""
    text = cell["source"].strip()
    same = [n for n, o in originals.items() if not _mark(o).get("solution") and "".join(o["source"]).strip() == text]
    return same[0] if len(same) == 1 else None


def _by_definitions(cell, originals):
    if cell["cell_type"] != "code" or not (own := _defined(cell["source"])):
        return None
    same = [n for n, o in originals.items() if o["cell_type"] == "code" and own & _defined("".join(o["source"]))]
    return same[0] if len(same) == 1 else None


def _defined(source):
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^(?:def|class)\s+(\w+)", source, flags=re.M))
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}


def _plain(cell):
    """A cell of the student's own: no mark of nbgrader, which would be taken for a task."""
    made = {"cell_type": cell["cell_type"], "metadata": {}, "source": cell["source"], "id": cell.get("id")}
    return made | ({"attachments": cell["attachments"]} if "attachments" in cell else {})


def _number(cells):
    """Give each cell an id of its own, and code cells what the format asks for. Changes `cells`."""
    marked = {cell["id"] for cell in cells if cell["metadata"]}
    seen = set(marked)
    for k, cell in enumerate(cells):
        if not cell["metadata"]:
            own = cell["id"]
            cell["id"] = own if isinstance(own, str) and ID.fullmatch(own) and own not in seen else _fresh(k, seen)
            seen.add(cell["id"])
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None


def _fresh(k, seen):
    name = f"own-{k}"
    while name in seen:
        name += "-"
    return name


def _mark(cell) -> dict:
    mark = cell.get("metadata", {}).get("nbgrader")
    return mark if isinstance(mark, dict) else {}
