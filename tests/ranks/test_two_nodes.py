"""torchrun on two "nodes" of one machine: each has its own network, host name and processes, and one slow cable joins them.

A node is a set of Linux namespaces, held by a `sleep` that is process number 1 in it: when it ends, so does everything inside,
and with it the cable. Nothing has a name outside, so nothing can be left behind, however a test ends. Where the system does not
allow it, these tests are skipped and say why.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

import fourwalls as fw
from fourwalls.collectives import get_algorithm
from fourwalls.collectives.hierarchical import find_nodes

LIFE = 60  # seconds after which a node ends by itself, whatever has become of the test
RATE = 20e6 / 8  # bytes/s each way
LIMIT = ("rate", "20mbit")
DELAY = "1ms"
TOOLS = ("unshare", "nsenter", "ip", "tc", "hostname")


class Unable(Exception):
    """Why this machine cannot have nodes."""


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    pid: int  # of its process number 1
    link: str  # what the cable does, in words

    def start(self, *command: str, **options) -> subprocess.Popen:
        """Begin a command inside."""
        return subprocess.Popen([*_inside(self.pid), *command], **options)


@contextmanager
def two_nodes():
    """(Node, Node), joined by a cable that is slow (and late, where the kernel can do that). Raises Unable."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unable("network namespaces need Linux and root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unable(f"no {', '.join(missing)} (iproute2, util-linux, hostname)")
    names, addresses = ("node-a", "node-b"), ("10.77.0.1", "10.77.0.2")
    with ExitStack() as stack:
        pids = [stack.enter_context(_node(name)) for name in names]
        ends = [["eth0", "netns", str(pid)] for pid in pids]
        _call("ip", "link", "add", *ends[0], "type", "veth", "peer", *["name", *ends[1]])
        links = []
        for pid, address in zip(pids, addresses, strict=True):
            _call(*_inside(pid), "ip", "link", "set", "lo", "up")
            _call(*_inside(pid), "ip", "address", "add", f"{address}/24", "dev", "eth0")
            _call(*_inside(pid), "ip", "link", "set", "eth0", "up")
            links.append(_slow(pid))
        yield tuple(Node(*of_node) for of_node in zip(names, addresses, pids, links, strict=True))


@contextmanager
def _node(name: str):
    """The process number 1, seen from outside, of fresh namespaces. All that runs in them is killed in the end."""
    spaces = ["--net", "--uts", "--mount-proc", "--pid", "--fork", "--kill-child=SIGKILL"]
    holder = subprocess.Popen(["unshare", *spaces, "sleep", str(LIFE)], stderr=subprocess.PIPE, text=True)
    try:
        yield _first_process(holder, name)
    finally:
        holder.kill()
        holder.communicate()


def _first_process(holder: subprocess.Popen, name: str) -> int:
    deadline = time.monotonic() + 10
    while holder.poll() is None and time.monotonic() < deadline:
        for child in psutil.Process(holder.pid).children():
            if child.name() == "sleep":
                _call(*_inside(child.pid), "hostname", name)
                return child.pid
        time.sleep(0.02)
    raise Unable(f"unshare: {holder.stderr.read().strip() if holder.poll() is not None else 'no answer'}")


def _inside(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--mount", "--pid", "--"]


def _slow(pid: int) -> str:
    """Limit what leaves this node, and delay it where the kernel has netem; what the cable does, in words."""
    device = ["tc", "qdisc", "add", "dev", "eth0", "root"]
    try:
        _call(*_inside(pid), *device, "netem", "delay", DELAY, *LIMIT, "limit", "10000")
        return f"{' '.join(LIMIT)}, delay {DELAY}"
    except Unable as no_netem:
        _call(*_inside(pid), *device, "tbf", *LIMIT, "burst", "16kb", "latency", "500ms")
        why = str(no_netem).rpartition("Error: ")[2]
        return f"{' '.join(LIMIT)}, no delay (netem: {why})"


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        raise Unable(f"{' '.join(command[-6:])}: {done.stderr.strip()}")


# --- the tests ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
os.chdir(os.path.dirname(__file__))  # entering a node leaves the folder
sys.path[:0] = [{utils!r}, {tests!r}]
import test_two_nodes as here, fourwalls as fw
from fourwalls.bench.__main__ import main

run = fw.run(here.program, timeout=10)
if os.environ["RANK"] == "3":
    json.dump(run.values, open("values.json", "w"))
sys.exit(main(["all-reduce", "--algorithms", "ring,hierarchical", "--sizes", "128KiB", "--pairs", "5", "--quiet",
               "--format", "json", "--out", "record.json"]))
"""


def program(comm, ranks_per_node=None):
    """Sums whose last bits depend on the order of the terms: equal bits mean the same algorithm on the same nodes."""
    x = 1 / (torch.arange(1001.0) + comm.rank + 3)
    ring = get_algorithm("all_reduce", "ring")(comm, x)
    two_level = get_algorithm("all_reduce", "hierarchical")(comm, x, ranks_per_node=ranks_per_node)
    return [find_nodes(comm, ranks_per_node), bits(ring), bits(two_level)]


def bits(x: torch.Tensor) -> str:
    return x.numpy().tobytes().hex()


@contextmanager
def nodes_or_skip():
    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes())
        except Unable as reason:
            pytest.skip(f"no two nodes on this machine: {reason}")
        yield nodes


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """(nodes, the values of `program`, the benchmark's record), by one torchrun in each node."""
    folder = tmp_path_factory.mktemp("two_nodes")
    paths = {"{utils!r}": Path(fw.__file__).parents[1], "{tests!r}": Path(__file__).parent}
    script = SCRIPT
    for name, path in paths.items():
        script = script.replace(name, repr(str(path)))
    (folder / "script.py").write_text(script)
    with nodes_or_skip() as nodes, ExitStack() as stack:
        began = [torchrun(node, nodes[0], folder) for node in nodes]
        deadline = time.monotonic() + 100  # a launch that hangs; a busy machine takes a minute
        for process in began:
            stack.callback(process.wait)
            stack.callback(process.kill)
        for process in began:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        said = "\n".join((folder / node.name).read_text() for node in nodes)
        assert [process.returncode for process in began] == [0, 0], said
    return nodes, json.loads((folder / "values.json").read_text()), json.loads((folder / "record.json").read_text())


def torchrun(node: Node, head: Node, folder: Path) -> subprocess.Popen:
    """Two ranks in `node`, which meet the others at `head`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    meet = ["--rdzv-id", "7", "--rdzv-endpoint", f"{head.address}:29400", "--rdzv-conf", f"is_host={int(node is head)}"]
    env = dict(os.environ, GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1")
    with (folder / node.name).open("w") as said:
        streams = {"stdout": said, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        return node.start(*command, *meet, "--local-addr", node.address, str(folder / "script.py"), env=env, **streams)


def test_two_nodes_give_the_bits_of_one_machine(launched):
    _, values, _ = launched
    alone = fw.run(program, 2, ranks=4).values
    assert values == alone
    assert values[0][0] == [[0, 1], [2, 3]] and values[0][1] != values[0][2]


def test_the_record_names_both_hosts_and_hierarchical_wins(launched, capsys):
    nodes, _, rows = launched
    assert all(row["ok"] and row["machine"]["hosts"] == ["node-a", "node-b"] and row["case"]["ranks"] == 4 for row in rows)
    times = {row["case"]["algorithm"]: row["value"] for row in rows if row["metric"] == "time" and not row["case"]["checks"]}
    ratio = times["hierarchical"] / times["ring"]
    with capsys.disabled():
        print(f"\n2 nodes x 2 ranks, 128 KiB ({nodes[0].link}): hierarchical {times['hierarchical']:.3g} s / ring")
        print(f"{times['ring']:.3g} s = {ratio:.3f}; by bytes on the cable 2/3")
    assert ratio < 1
    for row in rows:  # the cable really is the limit: a direction carries 3/2 S for the ring, S for hierarchical
        if row["metric"] == "time" and not row["case"]["checks"]:
            least = {"ring": 1.5, "hierarchical": 1.0}[row["case"]["algorithm"]] * 2**17 / RATE
            assert least * 0.8 < row["value"], row


def test_nothing_is_left_after_a_failure():
    with pytest.raises(ZeroDivisionError), nodes_or_skip() as nodes:
        inside = nodes[0].start("sh", "-c", "sleep 50 & echo; wait", stdout=subprocess.PIPE, start_new_session=True)
        inside.stdout.readline()
        pids = [node.pid for node in nodes] + [p.pid for p in psutil.Process(inside.pid).children(recursive=True)]
        assert len(pids) == 4 and all(map(psutil.pid_exists, pids))  # two first processes, a shell, its sleep
        raise ZeroDivisionError
    inside.communicate(timeout=5)
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, pids))


def test_what_cannot_be_had_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unable, match="need Linux and root"), two_nodes():
        pass


def test_the_slurm_script_asks_for_a_legal_torchrun(tmp_path):
    """srun and scontrol are stand-ins: the command that the script makes is read, not run."""
    from torch.distributed.run import parse_args

    root = Path(__file__).resolve().parents[2]
    for name, line in {"srun": 'printf "%s\\n" "$@"', "scontrol": "echo first; seq 50000"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(root), "SLURM_JOB_NODELIST": "n[1-2]"}
    env |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "81234", "SLURM_GPUS_ON_NODE": "8"}
    command = ["bash", str(root / "scripts/slurm/all_reduce.sbatch"), "--sizes", "1MiB"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=True)
    words = done.stdout.splitlines()
    given = parse_args(words[words.index("torch.distributed.run") + 1 :])
    assert (given.nnodes, given.nproc_per_node, given.rdzv_endpoint) == ("2", "8", "first:21234")
    assert given.module and given.training_script == "fourwalls.bench"
    from fourwalls.bench.__main__ import _parser

    assert _parser().parse_args(given.training_script_args).sizes == [2**20]
