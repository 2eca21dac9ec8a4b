"""Finds what was handed in, whatever a learning platform made of the names, and reads it without trusting it.

    DIR/STUDENT/LAB.ipynb     DIR/submitted/STUDENT/LAB/LAB.ipynb (nbgrader)     DIR/STUDENT.ipynb, DIR/STUDENT_LAB.ipynb
    DIR/name_12345_67890_LAB.ipynb (Canvas: user 12345)     DIR/First Last_12345_assignsubmission_file/LAB.ipynb (Moodle)

LAB may have a browser's or platform's number behind it: `ring (1).ipynb`, `ring-1.ipynb`. Of several files of one student the one
modified last counts (if that is equal, the last by name), and the others are reported. Nothing is guessed: a file that could be
two students', or has another name, is not graded, with the reason.

Reference: nbformat documentation, "The Notebook file format"; nbgrader documentation, "The structure of a course".
"""

import hashlib
import json
import os
import re
import stat
import unicodedata
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOST_BYTES", "Submission", "Unreadable", "find", "read"]

MOST_BYTES, MOST_TEXT, MOST_CELLS = 20 * 2**20, 2**20, 2000  # of a file; of the text in its cells; cells
CANVAS = re.compile(r"(?P<name>[^_]+)(_LATE)?_(?P<number>\d+)_\d+_.+")
MOODLE = re.compile(r"(?P<name>.+?)_(?P<number>\d+)_assignsubmission_.*")
OURS = ("graded", "__MACOSX")  # folders that are no students
PACKED = (".zip", ".7z", ".rar", ".gz", ".tar", ".tgz", ".xz", ".bz2")
MOST_NAME = 150  # bytes of a student's name: a file system takes 255 for a folder, and its composed form may be longer


class Unreadable(ValueError):
    """Why a file cannot be graded."""


@dataclass(frozen=True)
class Submission:
    """What one student handed in. path: the file that counts, or None and a `reason` why there is none.

    number: the platform's own for the student, or "". notes: what the teacher should know.
    """

    student: str
    path: Path | None
    reason: str = ""
    number: str = ""
    notes: tuple[str, ...] = ()


def find(folder: Path, lab: str) -> list[Submission]:
    """One Submission for each student, by name. Raises ValueError where there is nothing."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    within = folder / "submitted"
    nbgraders = within.is_dir() and not within.is_symlink()
    files: dict[tuple[str, str], list[Path]] = {}
    empty: dict[tuple[str, str], str] = {}
    spoken: dict[tuple[str, str], set[str]] = {}  # a student's name before it was cleaned

    def known(name, number=""):
        who = _clean(name), number
        spoken.setdefault(who, set()).add(unicodedata.normalize("NFC", name).strip())
        return who

    for entry in sorted((within if nbgraders else folder).iterdir()):
        if entry.name.startswith(".") or entry.name in OURS:
            continue
        if entry.is_symlink():
            empty[known(entry.name.removesuffix(".ipynb"))] = "it is a link to another place"
        elif entry.is_dir():
            who = known(*_of_folder(entry.name))
            found, why = _in_folder(entry / lab if nbgraders or (entry / lab).is_dir() else entry, lab)
            if found:
                files.setdefault(who, []).extend(found)
            else:
                empty[who] = why
        elif entry.suffix == ".ipynb" and not nbgraders:
            files.setdefault(known(*_of_file(entry.stem, lab)), []).append(entry)
        elif why := _no_notebook(entry):
            empty[known(*_of_file(entry.name.partition(".")[0], lab))] = why
    for who, names in spoken.items():
        if len(names) > 1:
            empty[who] = f"two names become one ({', '.join(sorted(names))[:200]}): rename one of them"
            files.pop(who, None)
    students = {name for name, _ in files}
    for who in [who for who in files if "_" in who[0] and who[0].partition("_")[0] in students and not who[1]]:
        other = who[0].partition("_")[0]
        empty[who] = f"wrong file name: {files.pop(who)[0].name} may be of {other} or of {who[0]}; {lab} is not its end"
    submissions = [_one(who, paths) for who, paths in files.items()]
    submissions += [Submission(who[0], None, why, who[1]) for who, why in empty.items() if who not in files]
    if not submissions:
        raise ValueError(f"nothing was handed in: {folder} has no notebook and no folder of a student")
    return sorted(submissions, key=lambda one: one.student)


def read(path: Path) -> dict:
    """The notebook: {"cells": [...], "metadata": {...}} with nothing in it but what is graded or shown. Raises Unreadable."""
    data = _bytes_of(path)
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        word = "not text" if isinstance(error, UnicodeDecodeError) else "not JSON"
        raise Unreadable(f"unreadable: the file is no notebook ({word}; cut off, or saved as something else?)") from None
    if isinstance(notebook, dict) and isinstance(notebook.get("worksheets"), list):
        notebook = {**notebook, "cells": [c for s in notebook["worksheets"] if isinstance(s, dict) for c in s.get("cells", [])]}
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise Unreadable("unreadable: the file is no notebook (it has no cells)")
    metadata = notebook.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    _check_kernel(metadata)
    if len(notebook["cells"]) > MOST_CELLS:
        raise Unreadable(f"too large: {len(notebook['cells'])} cells, at most {MOST_CELLS}")
    cells = [_cell(cell, k) for k, cell in enumerate(notebook["cells"])]
    text = sum(len(cell["source"]) for cell in cells)
    if text > MOST_TEXT:
        raise Unreadable(f"too large: {text:,} characters in its cells, at most {MOST_TEXT:,}")
    return {"cells": cells, "metadata": metadata}


def _bytes_of(path):
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        word = "it is a link to another place" if path.is_symlink() else f"it cannot be opened ({error.strerror})"
        raise Unreadable(f"unreadable: {word}") from None
    try:
        kind = os.fstat(handle)
        if not stat.S_ISREG(kind.st_mode):
            raise Unreadable("unreadable: it is no ordinary file")
        if kind.st_size > MOST_BYTES:
            size = f"{kind.st_size / 2**20:.0f} MB, at most {MOST_BYTES // 2**20}"
            raise Unreadable(f"too large: the file has {size} (clear its outputs, and save it again)")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"unreadable: it cannot be read ({error.strerror})") from None
    finally:
        os.close(handle)


def _check_kernel(metadata):
    kernel, language = metadata.get("kernelspec"), metadata.get("language_info")
    kernel, language = (part if isinstance(part, dict) else {} for part in (kernel, language))
    for spoken in (language.get("name"), kernel.get("language")):
        if spoken and str(spoken).lower() not in ("python", "ipython"):
            name = str(kernel.get("name"))[:40]
            raise Unreadable(f"foreign kernel: the notebook is in {str(spoken)[:40]} (kernel {name}), not in Python")


def _cell(cell, k):
    if not isinstance(cell, dict) or cell.get("cell_type") not in ("code", "markdown", "raw", "heading", "html"):
        raise Unreadable(f"unreadable: cell {k} is none")
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise Unreadable(f"unreadable: cell {k} has no text")
    kind = cell["cell_type"] if cell["cell_type"] in ("code", "markdown", "raw") else "markdown"
    metadata = cell.get("metadata")
    mark = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    kept = {"cell_type": kind, "source": re.sub("[\ud800-\udfff]", "\ufffd", source), "metadata": {}}
    if isinstance(cell.get("id"), str):
        kept["id"] = cell["id"]
    if isinstance(mark, dict):
        kept["metadata"]["nbgrader"] = mark
    if kind == "markdown" and _are_pictures(cell.get("attachments")):
        kept["attachments"] = cell["attachments"]
    return kept


def _are_pictures(attachments) -> bool:
    """Whether they have the form that nbformat asks for: name -> type -> text."""
    bundles = attachments.values() if isinstance(attachments, dict) else ()
    return bool(bundles) and all(isinstance(b, dict) and all(isinstance(text, str) for text in b.values()) for b in bundles)


def _of_folder(name):
    moodle = MOODLE.fullmatch(name)
    return (f"{moodle['name']}_{moodle['number']}", moodle["number"]) if moodle else (name, "")


def _of_file(stem, lab):
    """(student, the platform's number) of a file that lies beside others."""
    for form in (MOODLE, CANVAS):
        if match := form.fullmatch(stem):
            return f"{match['name']}_{match['number']}", match["number"]
    tail = re.fullmatch(rf"(.+?)[_ ]{re.escape(lab)}{_AGAIN}", stem)
    return tail[1] if tail else stem, ""


_AGAIN = r"(?: ?\(\d+\)|-\d+)?"  # what browsers and platforms add when there was one already


def _in_folder(folder, lab):
    """(files of the lab, "") or ([], why there is none) in a student's folder."""
    if folder.is_symlink() or not folder.is_dir():
        return [], "nothing was handed in" if not folder.is_symlink() else "it is a link to another place"
    try:
        there = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        return [], f"the folder cannot be read ({error.strerror})"
    books = [path for path in there if path.suffix == ".ipynb"]
    found = [path for path in books if re.fullmatch(rf"{re.escape(lab)}{_AGAIN}", path.stem)]
    if found:
        return [path for path in found if path.is_file()] or found, ""
    if books:
        return [], f"wrong file name: {', '.join(path.name[:60] for path in books[:3])} instead of {lab}.ipynb"
    return [], next((why for path in there if (why := _no_notebook(path))), "no notebook was handed in")


def _no_notebook(path):
    """Why a file that is no notebook is somebody's work all the same; "" where it is not."""
    name = path.name.lower()
    if name.endswith(PACKED):
        return f"{path.name[:60]} is an archive: unpack it"
    return f"wrong file name: {path.name[:60]} does not end in .ipynb" if ".ipynb" in name else ""


def _one(who, paths):
    """The newest of one student's files, and a note on the others."""
    last = max(paths, key=lambda path: (path.lstat().st_mtime_ns, path.name))
    others = ", ".join(sorted(path.name[:60] for path in paths if path != last))
    notes = (f"{len(paths)} files: {last.name[:60]} is the newest and counts, not {others}",) if others else ()
    return Submission(who[0], last, "", who[1], notes)


def _clean(name: str) -> str:
    """A name as it is stored: composed characters, no spaces around, nothing that cannot be printed or is taken for a path."""
    name = "".join(c if c.isprintable() and c not in '/\\:"<>|?*' else "_" for c in unicodedata.normalize("NFC", name)).strip()
    name = name.strip(".").strip()
    if len(name.encode()) <= MOST_NAME:
        return name or "_"
    short = name.encode()[: MOST_NAME - 9].decode(errors="ignore").strip()
    return f"{short}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"
