"""Machines that withhold something: a run goes on where it can, else it says in one CommError what is missing."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import fourwalls as fw
from fourwalls.ranks import forkserver, launch, servers
from fourwalls.ranks.comm import CommError
from fourwalls.ranks.launch import Session, check_loopback

pytestmark = pytest.mark.usefixtures("nothing_left")
UTILS = str(Path(fw.__file__).parents[1])


def in_namespace(kinds, prepare, code):
    """What a script printed, run as a process in namespaces of its own; skips where the machine does not let a test make them."""
    command = ["unshare", *kinds, "sh", "-c", prepare + '\nexec "$@"', "sh", sys.executable, "-c"]
    probe = "import sys"
    try:
        able = subprocess.run([*command, probe], capture_output=True, check=False, cwd="/").returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("no namespaces here")
    code = f"import sys; sys.path.insert(0, {UTILS!r})\n{code}"
    done = subprocess.run([*command, code], capture_output=True, text=True, timeout=120, check=False, cwd="/")
    assert done.stderr == ""
    return done.stdout


READ_ONLY = """set -e
for folder in /tmp /var/tmp /usr/tmp /dev/shm; do
    if [ -d $folder ]; then mount --bind $folder $folder; mount -o remount,ro,bind $folder; fi
done
mount -o remount,ro,bind /
"""


def test_nothing_can_be_written_anywhere():
    code = """
import os, tempfile
try:
    tempfile.gettempdir()
except OSError:
    import fourwalls as fw
    def program(comm):
        import torch
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
        for k in range(300 * (1 - comm.rank)): print(k)
        return comm.rank
    run = fw.run(program, ranks=2, stream=False)
    print(run.values, run.files, run.outputs[0].splitlines()[-1])
else:
    print("writable")
"""
    words = in_namespace(["--user", "--map-root-user", "--mount"], READ_ONLY, code).strip()
    if words == "writable":
        pytest.skip("this machine's folders cannot be made read-only")
    assert words == "[0, 1] [None, None] ... 100 more lines (400 bytes) were not kept"


def test_no_loopback_is_one_clear_error():
    code = """
import fourwalls as fw, time
import fourwalls.ranks.processes
began = time.monotonic()
try:
    fw.run(lambda comm: None, ranks=2)
except fw.CommError as error:
    print(time.monotonic() - began < 5, error)
"""
    words = in_namespace(["--user", "--map-root-user", "--net"], "", code)
    assert words.startswith("True no rank can be started: this machine does not answer itself at 127.0.0.1 (interface lo)")
    assert "`ip link set lo up`" in words


def test_the_loopback_check_passes_and_leaves_nothing_open():
    before = psutil.Process().num_fds()
    check_loopback()
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("at", [0, 1, 7, 20, 60])
def test_too_many_open_files_are_said_and_none_stays_open(at):
    """The limit is reached at the first, at some, and at nearly the last file of a session."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = psutil.Process().num_fds()
    highest = os.dup(0)  # the lowest number that is free
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + at, hard))
    try:
        with pytest.raises(CommError) as caught:
            Session(16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert psutil.Process().num_fds() == before
    text = str(caught.value)
    assert text.startswith("no rank can be started: 16 ranks need about ") and f"the limit is {highest + at}; " in text
    assert "ulimit -n" in text


def test_any_other_want_of_a_session_is_said_and_nothing_stays_open(monkeypatch):
    def refuse(size):
        raise OSError(errno.ENOMEM, "no memory for the book")

    monkeypatch.setattr(launch, "_nameless", refuse)
    before = psutil.Process().num_fds()
    with pytest.raises(CommError, match="no memory for the book"):
        Session(2)
    assert psutil.Process().num_fds() == before


def test_a_server_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(servers, "search_path", lambda: [p for p in sys.path if p != UTILS and p.startswith(sys.base_prefix)])
    server = servers.Server(warm=True)
    with pytest.raises(servers.ServerError, match="ModuleNotFoundError"):
        server.order({})


def test_a_server_that_fails_while_it_loads_says_why():
    """Its own traceback, last line last, and not a silent end."""
    code = f"import sys, socket; sys.path.insert(0, {UTILS!r}); from fourwalls.ranks import forkserver\n"
    code += "def fail(): raise RuntimeError('the reason')\nforkserver.preload = fail\n"
    code += "a, b = socket.socketpair(); forkserver.main(b.detach(), warm=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.strip().endswith("RuntimeError: the reason")


def test_without_a_folder_for_temporary_files_the_root_is_named(monkeypatch):
    def none():
        raise FileNotFoundError

    monkeypatch.setattr(forkserver.tempfile, "gettempdir", none)
    assert forkserver.existing_folder() == os.sep


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux sets the limits of another process")
def test_a_server_that_may_not_open_so_many_files_says_so_and_goes_on():
    """The kernel hands over as many of the files as fit, without an error: fewer than asked for is no run of fewer ranks."""
    fw.run(lambda comm: None, ranks=1)
    server = servers.Server.current(warm=True).process.pid
    before = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (24, before[1]))
    try:
        with pytest.raises(CommError, match="could not be started: Too many open files"):
            fw.run(lambda comm: None, ranks=16)
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, before)
    assert fw.run(lambda comm: comm.rank, ranks=4).values == [0, 1, 2, 3]
    assert servers.Server.current(warm=True).process.pid == server


def test_the_server_finds_what_lies_relative_to_our_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "more", "/lib", 5])
    assert servers.search_path() == [str(tmp_path), str(tmp_path / "more"), "/lib"]
    monkeypatch.setattr(os, "getcwd", lambda: (_ for _ in ()).throw(FileNotFoundError()))
    assert servers.search_path() == ["/lib"]


def test_the_working_folder_was_removed(tmp_path):
    """Ranks forked and fresh, one that returns and one that fails; a fresh one each, since each imports torch anew."""
    code = f"""
import sys; sys.path.insert(0, {UTILS!r})
import os, torch, fourwalls as fw
os.mkdir({str(tmp_path / "gone")!r}); os.chdir({str(tmp_path / "gone")!r}); os.rmdir({str(tmp_path / "gone")!r})
def program(comm, bad):
    if bad: raise ValueError("mine")
    return os.getcwd()
for start, ranks in (("fork", 2), ("spawn", 1)):
    print(fw.run(program, False, ranks=ranks, start=start).values)
    try:
        fw.run(program, True, ranks=ranks, start=start)
    except fw.RankError as error:
        print(str(error).splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    two, one = "rank 0 of 2 raised ValueError: mine", "rank 0 of 1 raised ValueError: mine"
    assert done.stdout.splitlines() == ["['/', '/']", two, "['/']", one], done.stderr
