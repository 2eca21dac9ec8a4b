"""The learner's own place: copies of the notebooks in `my/` and of the labs in `my/labs/`, without results or solutions, that no
update ever overwrites.

A copy is given once. As long as nobody has worked in it, it follows the notebook it came from; from the first change on
(a word, a run cell) it belongs to the learner and is kept, whatever happens upstream. What was given is remembered as a
fingerprint of the cells, so that merely opening and saving a notebook counts as nothing.

    a copy is the learner's own  <=>  fingerprint(my/NAME) != fingerprint remembered when it was given

Standard library only: `start.py` loads this file by its path, before anything is installed.
Reference: Kluyver et al., "Jupyter Notebooks, a publishing format for reproducible computational workflows", 2016.
"""

import contextlib
import datetime
import difflib
import hashlib
import json
import os
import pathlib
import tempfile
import time
from dataclasses import dataclass, field

from .release import student_copy

__all__ = ["Prepared", "alone", "cleared", "find", "fingerprint", "prepare", "reset"]

RECORD = ".given.json"
PROGRESS, LOCK = "progress.json", ".progress.lock"  # kept by progress.py


@dataclass
class Prepared:
    """What `prepare` did, by notebook name.

    new: given now. updated: untouched copies that followed a newer notebook. kept: the learner's own. behind: those of
    `kept` whose notebook has changed since. broken: notebooks that cannot be read, with the reason.
    """

    new: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)


def cleared(text: str) -> str:
    """A notebook's JSON text without outputs, execution counts, timings and widget state; cells and tags stay as they are.

    Raises ValueError if `text` is not a notebook.
    """
    book = _parse(text)
    for cell in book["cells"]:
        if cell.get("cell_type") == "code":
            cell["outputs"], cell["execution_count"] = [], None
        cell.get("metadata", {}).pop("execution", None)
    book.get("metadata", {}).pop("widgets", None)
    return json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def fingerprint(text: str) -> str:
    """What makes a copy someone's work: kind and source of each cell, and its outputs. Metadata and cell ids do not count.

    Text that is not a notebook has a fingerprint of its own, so a damaged copy counts as the learner's and is kept.
    """
    try:
        book = _parse(text)
    except ValueError:
        return "unreadable " + hashlib.sha256(text.encode()).hexdigest()
    cells = [[cell.get("cell_type"), "".join(cell.get("source", "")), cell.get("outputs") or []] for cell in book["cells"]]
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def prepare(root: str | os.PathLike) -> Prepared:
    """Give every notebook of `root/notebooks` a cleared copy in `root/my`, every lab of `root/labs/source` one without solutions
    in `root/my/labs`, and say what was done.

    Missing copies are made, untouched ones follow their notebook, edited ones stay. Raises OSError where `my/` cannot be
    written although something has to be.
    """
    root = pathlib.Path(root)
    place, done = root / "my", Prepared()
    place.mkdir(exist_ok=True)
    given = _read_record(place)
    before = dict(given)
    for name, source in _books(root).items():
        copy = place / name
        try:
            text = _given(source)
        except (ValueError, OSError) as error:
            done.broken[name] = str(error)
            continue
        fresh = fingerprint(text)
        if not copy.exists():
            _write(copy, text)
            given[name] = fresh
            done.new.append(name)
            continue
        mine = fingerprint(copy.read_text(encoding="utf-8", errors="replace"))
        if mine == fresh:
            given[name] = fresh
        elif mine == given.get(name):
            _write(copy, text)
            given[name] = fresh
            done.updated.append(name)
        else:
            done.kept.append(name)
            if given.get(name) != fresh:
                done.behind.append(name)
    if given != before:
        _write(place / RECORD, json.dumps(given, indent=1, sort_keys=True) + "\n")
    return done


def reset(root: str | os.PathLike, name: str) -> tuple[pathlib.Path, pathlib.Path | None]:
    """Give a fresh copy of one notebook. Returns (the copy, where the old one is kept or None if there was nothing to keep).

    A fresh copy asks its questions anew: the guesses made in it, those whose id begins with the notebook's number, are forgotten.
    name: "03_ring_all_reduce.ipynb", with or without the ending or a folder, or any beginning of it that fits only one ("03").
    Raises ValueError for a name that fits none or several.
    """
    root = pathlib.Path(root)
    source = find(root, name)
    place, text, given_as = root / "my", _given(source), next(key for key, book in _books(root).items() if book == source)
    copy, kept = place / given_as, None
    if copy.exists() and fingerprint(copy.read_text(encoding="utf-8", errors="replace")) != fingerprint(text):
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
        kept = copy.with_name(f"{copy.stem}.kept_{stamp}.ipynb")
        number = 2
        while kept.exists():
            kept = copy.with_name(f"{copy.stem}.kept_{stamp}_{number}.ipynb")
            number += 1
        os.replace(copy, kept)
    _write(copy, text)
    given = _read_record(place)
    given[given_as] = fingerprint(text)
    _write(place / RECORD, json.dumps(given, indent=1, sort_keys=True) + "\n")
    _forget_guesses(place, source.stem.partition("_")[0] + "-")
    return copy, kept


def _forget_guesses(place: pathlib.Path, beginning: str) -> None:
    """Take the guesses whose id starts so out of progress.json. A file that is missing or damaged is left to progress.py."""
    if not (place / PROGRESS).exists():
        return
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError), alone(place / LOCK):
        data = json.loads((place / PROGRESS).read_text(encoding="utf-8"))
        left = {question: guess for question, guess in data["guesses"].items() if not question.startswith(beginning)}
        if len(left) < len(data["guesses"]):
            _write(place / PROGRESS, json.dumps({**data, "guesses": left}, indent=1, sort_keys=True))


@contextlib.contextmanager
def alone(path: str | os.PathLike):
    """Hold the file `path` against other processes, waiting at most 5 s; then go on (an entry may be lost, files stay whole)."""
    try:
        import fcntl
    except ImportError:  # Windows without POSIX: processes there take turns by luck, the file is still replaced as a whole
        yield
        return
    with open(path, "a") as file:
        deadline = time.monotonic() + 5
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        yield  # closing the file lets go


def find(root: str | os.PathLike, name: str) -> pathlib.Path:
    """The notebook of `root/notebooks` or lab of `root/labs/source` that `name` means; see `reset` for what may be written."""
    books = list(_books(pathlib.Path(root)).values())
    word = pathlib.PurePath(name).name
    word = word.removesuffix(".ipynb")
    exact = [book for book in books if book.stem == word]
    fits = exact or [book for book in books if word and book.stem.startswith(word)]
    if len(fits) == 1:
        return fits[0]
    names = [book.stem for book in books]
    if fits:
        raise ValueError(f"{name!r} fits {', '.join(book.stem for book in fits)}: write enough of the name to tell them apart")
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(f"no notebook named {name!r}; {hint}There are: {', '.join(names) or 'none'}")


def _books(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """{name below my/: where it comes from}: the notebooks in order, then the labs."""
    labs = sorted((root / "labs" / "source").glob("*/*.ipynb"))
    return {book.name: book for book in sorted((root / "notebooks").glob("*.ipynb"))} | {
        f"labs/{book.name}": book for book in labs if book.stem == book.parent.name
    }


def _given(source: pathlib.Path) -> str:
    """The text of a learner's copy: a notebook's without results, a lab's without solutions too."""
    text = source.read_text(encoding="utf-8")
    return cleared(text if source.parent.name == "notebooks" else json.dumps(student_copy(_parse(text))))


def _parse(text: str) -> dict:
    try:
        book = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not a notebook: {error}") from None
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise ValueError("not a notebook: it has no list of cells")
    if not all(isinstance(cell, dict) for cell in book["cells"]):
        raise ValueError("not a notebook: a cell is not an object")
    return book


def _read_record(place: pathlib.Path) -> dict[str, str]:
    try:
        given = json.loads((place / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # lost or damaged: then every copy that differs counts as edited, and stays
    return given if isinstance(given, dict) else {}


def _write(path: pathlib.Path, text: str) -> None:
    """All of it or nothing: a copy is never seen half written."""
    path.parent.mkdir(exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing_")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
