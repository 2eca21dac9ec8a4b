"""Grading a class in one command: each verdict, each kind of trouble, killed in the middle and gone on with, and nothing left."""

import csv
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager, redirect_stderr
from pathlib import Path
from subprocess import DEVNULL

import psutil
import pytest

from fourwalls.course import submissions
from fourwalls.course.box import Bounds
from fourwalls.course.grading import Grading, Stopped, _alone
from fourwalls.course.release import find_leaks, secret_lines
from fourwalls.course.restore import restore
from fourwalls.course.submissions import Unreadable, find, read
from fourwalls.course.verdicts import Task, Verdict

from . import handed_in as given
from .handed_in import LAB, ROOT, TASKS, TWIST, without, write

pytestmark = pytest.mark.filterwarnings("default")  # nbgrader's own are not ours
COMMAND = [sys.executable, "-m", "fourwalls.course", "grade", "--lab", LAB, "--twist", str(TWIST), "--workers", "1"]
CONFINED = {"burglar", "bombs"}  # whose points say what the sandbox does

REFRESH = '<meta http-equiv="refresh" content="0; url=http://192.0.2.1/">'  # a policy does not keep anybody from following it
RIGHT = "Anna Ærlig Ødegård"  # right, in a notebook that was taken apart and copied; the first of all

# student -> points by task, or the beginning of the reason why there are none
EXPECTED = {
    RIGHT: TASKS,
    "bombs": without("shift", "reduce_scatter", "all_reduce"),
    "burglar": without(*TASKS),
    "corrupt": "unreadable: the file is no notebook",
    "dies": "dead kernel: the process ended in cell leaving",
    "empty": "no notebook was handed in",
    "foreign": "foreign kernel: the notebook is in R",
    "huge": "too large: the file has 50 MB",
    "linked": "unreadable: it is a link",
    "misnamed": "wrong file name: lab1.ipynb instead of ring.ipynb",
}


@pytest.fixture(scope="module")
def server():
    """Somebody on this machine who could be called."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.setblocking(False)
        yield listening


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server):
    """What the class handed in."""
    place = tmp_path_factory.mktemp("class") / "handed in"
    canary = place.parent / f"canary-{os.getpid()}"
    write(place / RIGHT / "ring.ipynb", given.wrong("shift"), modified=1_000_000)
    notebook = given.messy(given.leaves_files(canary))
    notebook["cells"].append(given.own(f"Look: {REFRESH}<script>alert(1)</script>", "look", "markdown"))
    mine = write(place / RIGHT / "ring (1).ipynb", notebook, modified=2_000_000)
    write(place / "bombs" / "ring.ipynb", given.bombs())
    write(place / "burglar" / "ring.ipynb", given.burglar(mine, server.getsockname()[1], canary))
    write(place / "corrupt" / "ring.ipynb", json.dumps(given.right()).encode()[:-40])
    write(place / "dies" / "ring.ipynb", given.dies_at_once())
    (place / "empty").mkdir()
    write(place / "foreign" / "ring.ipynb", given.foreign())
    write(place / "huge" / "ring.ipynb", b'{"cells": [], "x": "' + b"x" * (50 * 2**20) + b'"}')
    (place / "linked").mkdir()
    (place / "linked" / "ring.ipynb").symlink_to(mine)
    write(place / "misnamed" / "lab1.ipynb", given.right())
    return place


def noted(folder):
    """The lines of the book so far, by student."""
    path = folder / "graded" / LAB / "verdicts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["student"]: line for line in map(json.loads, lines)}


def graded_in(folder):
    return [line for line in noted(folder).values() if line["verdict"] == "graded"]


def at_work(process):
    """Whether it does anything still: one that has ended may wait for the first process of the machine to take note."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def course(folder):
    """Graded in two runs: the first is killed as soon as something is graded. (verdicts of the first, output of the second)."""
    with subprocess.Popen([*COMMAND, str(folder)], cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True) as first:
        end = time.monotonic() + 120
        while not graded_in(folder) and first.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        below = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGKILL)
    end = time.monotonic() + 15
    while (alive := [p for p in below if at_work(p)]) and time.monotonic() < end:
        time.sleep(0.05)
    before, said = noted(folder), []
    with redirect_stderr(io.StringIO()) as bar:
        Grading(ROOT, folder, LAB, TWIST, say=said.append, workers=2, bounds=Bounds(memory=600 * 2**20)).run()
    return {"before": before, "alive": alive, "below": below, "said": said, "bar": bar.getvalue()}


def test_a_grader_that_is_killed_leaves_no_process_and_goes_on_where_it_was(folder, course):
    assert course["below"] and course["alive"] == []
    first = [v for v in course["before"].values() if v["verdict"] == "graded"]
    assert first and len(first) < len([e for e in EXPECTED.values() if isinstance(e, dict)])
    assert course["said"][0] == f"{len(first)} of {len(EXPECTED)} are graded already"
    after = noted(folder)
    assert all(after[v["student"]] == v for v in first)
    lines = (folder / "graded" / LAB / "verdicts.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["student"] for line in lines)[first[0]["student"]] == 1


@pytest.fixture
def confined(course):
    """Only where this machine lets a submission be shut in."""
    if not ("Isolation: namespaces" in course["bar"] or "Isolation: bubblewrap" in course["bar"]):
        pytest.skip("no namespaces on this machine")


@pytest.mark.parametrize("student", EXPECTED)
def test_verdict(folder, course, student, request):
    if student in CONFINED:
        request.getfixturevalue("confined")
    line, expected = noted(folder)[student], EXPECTED[student]
    if isinstance(expected, str):
        assert line["verdict"] == "not graded" and line["tasks"] == {}
        assert line["reason"].startswith(expected), line["reason"]
    else:
        assert line["verdict"] == "graded", line["reason"]
        assert {name: task["points"] for name, task in line["tasks"].items()} == expected, line


def lines_of(folder, student, task):
    return "\n".join(noted(folder)[student]["tasks"][task]["lines"])


def test_each_bomb_costs_its_own_task_and_says_why(folder, course):
    assert "Resource temporarily unavailable" in lines_of(folder, "bombs", "shift")
    assert "more than 600 MiB of memory" in lines_of(folder, "bombs", "reduce_scatter")
    assert "still at work when 10 s were over" in lines_of(folder, "bombs", "all_reduce")


def test_a_burglar_finds_nothing(folder, course, confined, server):
    for task in ("shift", "reduce_scatter", "all_reduce"):
        assert "No such file" in lines_of(folder, "burglar", task)
    assert "Network is unreachable" in lines_of(folder, "burglar", "all_gather")
    with pytest.raises(BlockingIOError):
        server.accept()


def test_nothing_is_left_but_the_course(folder, course, confined):
    canary = f"canary-{os.getpid()}"
    assert [d for d in (folder.parent, folder, "/tmp", "/var/tmp", "/dev/shm", ROOT) if Path(d, canary).exists()] == []
    assert {p.name for p in folder.iterdir()} == {*EXPECTED, "graded"}
    assert {p.name for p in (folder / "graded").iterdir()} == {
        "autograded", "feedback", "gradebook.db", LAB, "source", "submitted", "release", ".grader",
    }  # fmt: skip
    mine = str(folder)
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if mine in " ".join(p.info["cmdline"] or ())] == []


def test_what_was_done_to_the_cells_is_undone_and_told(folder, course):
    notes = " | ".join(noted(folder)[RIGHT]["notes"])
    for words in (
        "test cell ring-check-shift was missing: put back",
        "test cell ring-check-reduce-scatter was edited",
        "test cell ring-check-all-gather was there 2 times",
        "test cell ring-check-reduce-scatter was made a markdown cell",
        "cell ring-all-gather was made a raw cell: restored",
        "test cell ring-check-all-reduce was there 2 times",
        "cell ring-reduce-scatter was there 2 times",
        "cell ring-begin was edited: restored",
        "a test cell that is not ours (bonus) counts for nothing",
    ):
        assert words in notes, notes
    assert "2 files: ring (1).ipynb is the newest and counts, not ring.ipynb" in notes


def table(folder, name):
    with open(folder / "graded" / LAB / name, encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_tables_have_a_row_for_everybody_and_no_zero_that_nobody_gave(confined, folder, course):
    head, *rows = table(folder, "grades.csv")
    columns = [*(t.replace("_", "-") for t in TASKS), "where-it-loses"]
    assert head == ["student", "verdict", "reason", *columns, "total", "max", "open", "notes"]
    assert [row[0] for row in rows] == sorted(EXPECTED)
    for row in rows:
        expected = EXPECTED[row[0]]
        if isinstance(expected, str):
            assert row[1] == "not graded" and row[3:9] == [""] * 6 and row[9] == "30"
        else:
            answer, still_open = ("0", "0") if row[0] == "burglar" else ("", "6")  # the one who wrote nothing
            assert row[3:8] == [*map(str, expected.values()), answer], row
            assert row[8:11] == [str(sum(expected.values())), "30", still_open]
    canvas = table(folder, "grades_canvas.csv")
    assert canvas[0] == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "ring (tests)", "ring (by hand)"]
    assert canvas[1][0].strip() == "Points Possible" and canvas[1][5:] == ["24", "6"]
    assert {row[0]: row[5:] for row in canvas[2:]}[RIGHT] == ["24", ""]
    assert {row[0]: row[5:] for row in canvas[2:]}["corrupt"] == ["", ""]
    scope = table(folder, "grades_gradescope.csv")
    assert scope[0][4:9] == ["Total Score", "Max Points", "Status", "1: shift (4.0 pts)", "2: reduce-scatter (6.0 pts)"]
    assert {row[2]: row[6] for row in scope[1:]}[RIGHT] == "Ungraded"  # the open question waits


def test_the_database_has_what_the_judge_said_and_nobody_twice(confined, folder, course):
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{folder}/graded/gradebook.db") as book:
        assert sorted(student.id for student in book.students) == sorted(EXPECTED)
        for student, expected in EXPECTED.items():
            (notebook,) = book.find_submission(LAB, student).notebooks
            auto = {g.name: (g.auto_score, g.needs_manual_grade) for g in notebook.grades}
            answer = auto.pop("ring-where-it-loses")
            if isinstance(expected, str):
                assert set(auto.values()) == {(None, True)} and notebook.flagged and answer == (None, True)
            else:
                wanted = {f"ring-check-{task.replace('_', '-')}": (points, False) for task, points in expected.items()}
                assert auto == wanted and not notebook.flagged
                assert answer == ((0, False) if student == "burglar" else (None, True))
            assert len(notebook.grades) == 5


def test_feedback_shows_verdicts_and_hints_runs_nothing_and_has_no_line_of_the_checks(folder, course):
    source = json.loads((ROOT / "labs" / "source" / LAB / f"{LAB}.ipynb").read_text())
    secrets = {k: w for k, w in secret_lines(source, ROOT / "utils/fourwalls/course/lab_ring.py").items() if "checks" in w}
    for student in EXPECTED:
        page = (folder / "graded" / "feedback" / student / LAB / f"{LAB}.html").read_text(encoding="utf-8")
        assert "Content-Security-Policy" in page.partition("</title>")[0] and "default-src 'none'" in page
        assert "<meta" not in page.partition("</head>")[2] and (student != RIGHT or "192.0.2.1" in page)
        words = "".join(page.split("</style>")[-1])
        assert find_leaks({"page": words}, secrets) == []
        assert (EXPECTED[student] if isinstance(EXPECTED[student], str) else "of 4 points") in words


def test_running_again_tries_what_was_not_graded_and_leaves_the_rest(folder, course):
    before, said = noted(folder), []
    pages = {p: p.stat().st_mtime_ns for p in (folder / "graded" / "feedback" / RIGHT).rglob("*.html")}
    write(folder / "misnamed" / "ring.ipynb", given.foreign())
    (folder / "dies").rename(folder.parent / "dies")  # it would be tried again, which takes time
    try:
        Grading(ROOT, folder, LAB, TWIST, say=said.append).run()
    finally:
        (folder.parent / "dies").rename(folder / "dies")
        (folder / "misnamed" / "ring.ipynb").unlink()
    graded = [name for name, line in before.items() if line["verdict"] == "graded"]
    assert said[0] == f"{len(graded)} of {len(EXPECTED) - 1} are graded already"
    after = noted(folder)
    assert after["misnamed"]["reason"].startswith("foreign kernel") and all(after[name] == before[name] for name in graded)
    assert pages and {p: p.stat().st_mtime_ns for p in pages} == pages


def test_another_version_of_the_lab_or_a_lost_gradebook_is_graded_anew(folder, course):
    from nbgrader.api import Gradebook

    again = Grading(ROOT, folder, LAB, TWIST)
    again._open()
    one = next(one for one in find(folder, LAB) if one.student == RIGHT)
    assert again._is_done(one)
    again.version = "another"
    assert not again._is_done(one)
    other = Grading(ROOT, folder, LAB, TWIST + 1)
    other._open()
    assert not other._is_done(one)
    lost = Grading(ROOT, folder, LAB, TWIST, out=shutil.copytree(folder / "graded", folder.parent / "lost"))
    lost._open()
    assert lost._is_done(one)
    with Gradebook(lost.course.directory.db_url) as book:
        book.remove_submission(LAB, RIGHT)
    assert not lost._is_done(one)


# --- the end before the end, without judges ---------------------------------------------------------------------------------
class Stubbed:
    """Judges that say of every notebook that it is right; before the second, `stop` is raised."""

    def __init__(self, stop=None):
        self.stop = stop

    @contextmanager
    def __call__(self, count, bar):
        yield self

    def judge(self, notebooks):
        for k, (student, _) in enumerate(notebooks):
            if k and self.stop is not None:
                raise self.stop
            yield Verdict(student, "graded", tasks={name: Task(p, p, ["ok", f"{p} of {p} points"]) for name, p in TASKS.items()})


@pytest.fixture
def pair(folder, course, tmp_path, monkeypatch):
    """run(stop) grades two students into a copy of the course; what it says."""
    for name in ("yan", "zoe"):
        write(tmp_path / "pair" / name / "ring.ipynb", given.right())
    out = shutil.copytree(folder / "graded", tmp_path / "graded")

    def run(stop=None):
        said = []
        grading = Grading(ROOT, tmp_path / "pair", LAB, TWIST, out=out, say=said.append)
        monkeypatch.setattr(grading, "_judges", Stubbed(stop))
        try:
            grading.run()
        finally:
            run.said, run.noted = said, set(grading.book.verdicts) & {"yan", "zoe"}
            run.rows = {row.student for row in grading.course.rows()} & {"yan", "zoe"}
        return said

    return run


def test_an_interrupt_keeps_what_is_done_and_a_persons_points_are_in_the_tables_the_next_time(pair, tmp_path):
    from nbgrader.api import Gradebook

    with pytest.raises(KeyboardInterrupt):
        pair(KeyboardInterrupt())
    assert pair.noted == {"yan"} == pair.rows
    assert any("1 are still to be done: run the same command again" in line for line in pair.said)
    table = tmp_path / "graded" / LAB / "grades.csv"
    assert "yan,graded,,4,6,6,8,,24,30,6," in table.read_text()
    with Gradebook(f"sqlite:///{tmp_path}/graded/gradebook.db") as book:
        grade = book.find_grade(given.ANSWER, LAB, LAB, "yan")
        grade.manual_score, grade.needs_manual_grade = 4.5, False
        book.db.commit()
    assert "1 of 2 are graded already" in pair()[0] and pair.noted == {"yan", "zoe"} == pair.rows
    with _alone(tmp_path / "graded"), pytest.raises(Stopped, match="another grader is at work"):
        pair()
    assert "yan,graded,,4,6,6,8,4.5,28.5,30,0," in table.read_text() and "zoe,graded,,4,6,6,8,,24,30,6," in table.read_text()


def test_one_that_nbgrader_does_not_take_stops_nobody_and_a_full_disk_is_one_sentence(pair, monkeypatch):
    from fourwalls.course import gradebook

    def fails(self, output, resources):
        full = resources["nbgrader"]["student"] == "zoe"
        raise OSError(28, "No space left on device") if full else RuntimeError("a page that cannot be drawn")

    monkeypatch.setattr(gradebook._Feedback, "write_single_notebook", fails)
    with pytest.raises(Stopped, match=r"^The disk that holds .* is full\. What was graded before is kept; free some"):
        pair()
    assert pair.noted == {"yan"} and "0 of 2 graded, 1 not graded" in pair.said[0]
    assert re.search(r"yan: nbgrader did not take yan .*a page that cannot be drawn", pair.said[1])


# --- finding and reading, with no process at all --------------------------------------------------------------------------------
def names(folder):
    return {one.student: one.path.name if one.path else one.reason for one in find(folder, LAB)}


def test_what_platforms_make_of_names(tmp_path):
    for name in (
        "anna.ipynb", "ben_ring.ipynb", "jo_ann.ipynb", "carl ring (2).ipynb", "liwei_12345_67890_ring-1.ipynb",
        "liwei_LATE_12399_67891_ring.ipynb", "Dora Doe_77_assignsubmission_file/ring.ipynb", "eve/ring/ring.ipynb",
    ):  # fmt: skip
        write(tmp_path / name, given.release())
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert names(tmp_path) == {
        "anna": "anna.ipynb",
        "ben": "ben_ring.ipynb",
        "jo_ann": "jo_ann.ipynb",
        "carl": "carl ring (2).ipynb",
        "liwei_12345": "liwei_12345_67890_ring-1.ipynb",
        "liwei_12399": "liwei_LATE_12399_67891_ring.ipynb",
        "Dora Doe_77": "ring.ipynb",
        "eve": "ring.ipynb",
    }
    write(tmp_path / "jo.ipynb", given.release())
    assert names(tmp_path)["jo_ann"].startswith("wrong file name: jo_ann.ipynb may be of jo or of jo_ann")


def test_nbgraders_own_layout_and_nothing_at_all(tmp_path):
    write(tmp_path / "submitted" / "anna" / LAB / "ring.ipynb", given.release())
    (tmp_path / "submitted" / "ben").mkdir()
    assert names(tmp_path) == {"anna": "ring.ipynb", "ben": "nothing was handed in"}
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="nothing was handed in"):
        find(tmp_path / "none", LAB)
    (tmp_path / "none" / "sly").symlink_to(tmp_path / "submitted" / "anna")
    assert names(tmp_path / "none") == {"sly": "it is a link to another place"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xfe\x00", "not text"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "no cells"),
        (b'{"cells": [3]}', "cell 0 is none"),
        (b'{"cells": [{"cell_type": "code", "source": 7}]}', "cell 0 has no text"),
        (json.dumps({"cells": [given.own("x" * 2**20 + "x")]}).encode(), "too large: 1,048,577 characters"),
        (json.dumps({"cells": [given.own("")] * 2001}).encode(), "2001 cells"),
    ],
)
def test_what_is_no_notebook_is_said(tmp_path, data, says):
    with pytest.raises(Unreadable, match=says):
        read(write(tmp_path / "ring.ipynb", data))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "ring.ipynb")
    with pytest.raises(Unreadable, match="no ordinary file"):
        read(tmp_path / "ring.ipynb")


def test_stripped_metadata_costs_nobody_a_point(tmp_path):
    wanted = given.right()
    restored, notes = restore(read(write(tmp_path / "ring.ipynb", given.stripped())), given.release())
    texts = {c["metadata"]["nbgrader"]["grade_id"]: c["source"] for c in restored["cells"] if c["metadata"]}
    asked = {c["id"]: "".join(c["source"]) for c in wanted["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id")}
    answer = asked.pop(given.ANSWER)
    assert texts.pop(given.ANSWER) == "YOUR ANSWER HERE" and answer in [c["source"] for c in restored["cells"]]
    assert texts == asked
    assert any("had lost their marks" in note for note in notes) and any(given.ANSWER in note for note in notes)
    untouched, none = restore(read(write(tmp_path / "b.ipynb", wanted)), given.release())
    assert none == [] and [c["source"] for c in untouched["cells"]] == ["".join(c["source"]) for c in wanted["cells"]]


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_BYTES", 100)
    with pytest.raises(Unreadable, match="too large: the file has"):
        read(write(tmp_path / "ring.ipynb", given.release()))
