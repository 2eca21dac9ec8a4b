"""What ranks print: complete, labelled, in order, live, and bounded."""

import ctypes
import io
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import fourwalls as fw
from fourwalls.ranks import output
from fourwalls.ranks.comm import RankError
from fourwalls.ranks.output import SHOWN_LINES, Output


def collect(feeds, *, tmp_path, stream=False):
    found = Output(2, stream=stream, scratch=lambda: tmp_path)
    for rank, data in feeds:
        found.feed(rank, data)
    found.finish()
    return found


# --- the collector ----------------------------------------------------------------------------------------------------
def test_lines_cut_anywhere_are_joined_and_unfinished_ones_are_shown(tmp_path):
    word = "häuser ✓".encode()
    found = collect([(0, word[:2]), (1, b"b"), (0, word[2:9]), (0, word[9:] + b"\nlast"), (1, b"\n\n")], tmp_path=tmp_path)
    assert found.texts == ["häuser ✓\nlast\n", "b\n\n"]


def test_bytes_that_are_no_text_do_no_harm(tmp_path):
    assert collect([(0, b"\xff\xfe\n")], tmp_path=tmp_path).texts[0] == "\ufffd\ufffd\n"


def test_of_a_progress_bar_the_last_state_counts(tmp_path):
    assert collect([(0, b" 1%\r 50%\r 99%\r\ndone\r\n")], tmp_path=tmp_path).texts[0] == " 99%\ndone\n"


def test_too_many_lines_go_to_a_file_and_too_many_bytes_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "FILE_BYTES", 1000)
    found = collect([(1, b"".join(b"line %d\n" % k for k in range(1000)))], tmp_path=tmp_path)
    lines = found.texts[1].splitlines()
    assert lines[:SHOWN_LINES] == [f"line {k}" for k in range(SHOWN_LINES)]
    rest = b"".join(b"line %d\n" % k for k in range(SHOWN_LINES, 1000))
    assert lines[SHOWN_LINES] == (
        f"... 800 more lines ({len(rest):,} bytes), of which the first 1,000 bytes are in the file run.files[1], "
        "until this notebook or script ends"
    )
    assert len(lines) == SHOWN_LINES + 1
    assert Path(found.files[1]).read_bytes() == rest[:1000]
    assert found.files[0] is None


def test_one_endless_line_is_bounded(tmp_path):
    found = collect([(0, b"x" * 50_000)] * 40, tmp_path=tmp_path)
    assert len(found.texts[0]) < 2 * output.SHOWN_BYTES
    assert Path(found.files[0]).stat().st_size <= output.FILE_BYTES


def test_no_room_for_the_file_loses_text_but_not_the_run(tmp_path):
    found = Output(1, stream=False, scratch=lambda: tmp_path / "missing")
    found.feed(0, b"line\n" * 500)
    found.finish()
    assert found.texts[0].endswith("were not kept\n")


# --- real ranks -------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("nothing_left")
def test_a23_all_lines_of_all_ranks_arrive_labelled_and_in_order_per_rank():
    def program(comm):
        libc = ctypes.CDLL(None)
        for k in range(100):
            if k % 10 == 3:
                print(f"error {k}", file=sys.stderr)
            elif k % 10 == 7:
                libc.printf(b"from C %d\n", k)
            else:
                print(f"line {k}")
        libc.printf(b"no ")
        libc.fflush(None)
        print("newline", end="")
        libc.printf(b" here")

    words = {3: "error", 7: "from C"}
    expected = [f"{words.get(k % 10, 'line')} {k}" for k in range(100)] + ["no newline here"]
    stream = io.StringIO()
    with redirect_stdout(stream):
        run = fw.run(program, ranks=4)
    assert [text.splitlines() for text in run.outputs] == [expected] * 4
    assert run.output == "".join(f"[rank {r}] {line}\n" for r in range(4) for line in expected)
    shown = stream.getvalue().splitlines()
    assert sorted(shown) == sorted(run.output.splitlines())
    for rank in range(4):
        assert [line for line in shown if line.startswith(f"[rank {rank}]")] == [f"[rank {rank}] {line}" for line in expected]


@pytest.mark.usefixtures("nothing_left")
def test_a25_lines_are_shown_while_the_rank_runs():
    class Clock(io.StringIO):
        def write(self, text):
            seen.append((time.monotonic(), text))
            return len(text)

    def program(comm):
        for k in range(4):
            print(f"part {k}")
            time.sleep(0.25)

    seen = []
    with redirect_stdout(Clock()):
        fw.run(program, ranks=1)
    times = [when for when, text in seen if "part" in text]
    assert len(times) == 4
    assert 0.6 < times[-1] - times[0] < 3  # as they came, not all at the end


@pytest.mark.usefixtures("nothing_left")
def test_without_stream_nothing_is_shown_and_all_is_kept():
    stream = io.StringIO()
    with redirect_stdout(stream):
        run = fw.run(lambda comm: print("quiet"), ranks=2, stream=False)
    assert stream.getvalue() == "" and run.outputs == ["quiet\n", "quiet\n"]


@pytest.mark.usefixtures("nothing_left")
def test_the_words_of_a_rank_that_fails_are_not_lost():
    def program(comm):
        print("the last words", end="")
        raise ValueError

    stream = io.StringIO()
    with redirect_stdout(stream), pytest.raises(RankError):
        fw.run(program, ranks=1)
    assert stream.getvalue() == "[rank 0] the last words\n"


def test_printing_without_end_is_bounded_and_can_be_interrupted(tmp_path, monkeypatch):
    import os
    import signal

    import psutil

    def program(comm):
        while True:
            print("x" * 200)

    before = psutil.Process().memory_info().rss
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with redirect_stdout(io.StringIO()) as stream, pytest.raises(KeyboardInterrupt):
        fw.run(program, ranks=2)
    assert psutil.Process().memory_info().rss - before < 50 * 2**20
    assert len(stream.getvalue().splitlines()) == 2 * (SHOWN_LINES + 1)


# --- a notebook -------------------------------------------------------------------------------------------------------
CELLS = [
    "import os, sys, time\nsys.path.insert(0, {utils!r})\nimport fourwalls as fw\nscale = 10",
    "def helper(comm):\n    return scale * comm.rank",
    (
        "def program(comm):\n    for k in range(3):\n        time.sleep(0.02 * ((comm.rank * 7 + k) % 3))\n"
        "        print('line', k)\n    return helper(comm)\nprint('before')\nfw.run(program, ranks=3).values"
    ),
    "def bad(comm):\n    y = 1 / comm.rank\n    return y",
    "fw.run(bad, ranks=2)",
    "import inspect\nfw.run(lambda comm: inspect.getsource(helper).splitlines()[0], ranks=1).values",
]


def test_a01_b14_h13_a_notebook(tmp_path):
    """Helpers of other cells, output that is the same each time, and an error that names the cell."""
    notebook = nbformat.v4.new_notebook()
    utils = str(Path(fw.__file__).parents[1])
    notebook.cells = [nbformat.v4.new_code_cell(c.replace("{utils!r}", repr(utils))) for c in CELLS]
    notebook.cells += [nbformat.v4.new_code_cell(CELLS[2]) for _ in range(4)]
    NotebookClient(notebook, timeout=120, allow_errors=True, kernel_name="python3").execute()
    runs = [notebook.cells[2], *notebook.cells[len(CELLS) :]]
    for cell in runs:
        kinds = [(o.output_type, o.get("name")) for o in cell.outputs]
        assert kinds == [("stream", "stdout"), ("display_data", None), ("stream", "stdout"), ("execute_result", None)]
        assert cell.outputs[1].data == {}
        assert cell.outputs[2].text == "".join(f"[rank {r}] line {k}\n" for r in range(3) for k in range(3))
        assert cell.outputs[3].data["text/plain"] == "[0, 10, 20]"
    (error,) = notebook.cells[4].outputs
    assert error.ename == "RankError"
    assert "\n".join(error.traceback) == (
        "RankError: rank 0 of 2 raised ZeroDivisionError: division by zero\n  at In [4] line 2 in bad: y = 1 / comm.rank"
    )
    assert "def helper(comm):" in notebook.cells[5].outputs[0].data["text/plain"]


def test_what_cannot_be_kept_is_counted_and_the_run_goes_on(tmp_path):
    """No folder for temporary files, then a folder that has gone: no path is named, since nothing lies there."""

    def none():
        raise FileNotFoundError("no usable temporary directory")

    for scratch in (none, lambda: tmp_path / "gone"):
        found = Output(1, stream=False, scratch=scratch)
        for _ in range(2):
            found.feed(0, b"x\n" * 250)
        found.feed(0, b"y" * (output.FILE_BYTES + 1) + b"\n")
        found.finish()
        assert found.files == [None]
        assert found.ranks[0].lines[SHOWN_LINES:] == ["... 301 more lines (8,389,210 bytes) were not kept"]
