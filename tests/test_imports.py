"""Which package may import which: the contracts of pyproject.toml hold, and each of them sees a violation."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

# A forbidden import for each contract, as (file, line).
PLANTED = {
    "layers": ("fourwalls/ranks/trace.py", "from fourwalls import collectives"),
    "viz": ("fourwalls/viz/style.py", "import fourwalls.ranks.comm"),
    "cost": ("fourwalls/cost/units.py", "import torch"),
    "widgets": ("fourwalls/viz/timeline.py", "import ipywidgets"),
    "start": ("fourwalls_start/needs.py", "import fourwalls.cost"),
    "circles": ("fourwalls_start/needs.py", "import fourwalls_start.install"),
}


def verdicts(folder):
    """{id of a contract: "KEPT" or "BROKEN"} of the checkout `folder`, and all that was said."""
    env = dict(os.environ, PYTHONPATH=str(folder / "utils"), COLUMNS="400", NO_COLOR="1")
    program = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    found = {}
    for contract in CONTRACTS:
        row = re.search(rf"^{re.escape(contract['name'])} (KEPT|BROKEN)", done.stdout, flags=re.MULTILINE)
        found[contract["id"]] = row[1] if row else "not checked"
    assert (done.returncode == 0) is (set(found.values()) == {"KEPT"}), done.stdout + done.stderr
    return found, done.stdout + done.stderr


@pytest.fixture(scope="module")
def own():
    return verdicts(ROOT)


@pytest.mark.parametrize("name", [contract["id"] for contract in CONTRACTS])
def test_contract_is_kept(own, name):
    found, said = own
    assert found[name] == "KEPT", said


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The verdicts on a copy with all violations planted."""
    copy = tmp_path_factory.mktemp("planted")
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(ROOT / "utils", copy / "utils", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file, line in PLANTED.values():
        path = copy / "utils" / file
        path.write_text(path.read_text() + f"\n{line}\n")
    return verdicts(copy)[0]


@pytest.mark.parametrize("name", [contract["id"] for contract in CONTRACTS])
def test_contract_sees_a_violation(broken, name):
    assert broken[name] == "BROKEN"


def test_every_package_of_the_design_has_its_floor():
    layers = next(contract for contract in CONTRACTS if contract["id"] == "layers")["layers"]
    order = [
        "cost",
        "ranks",
        "collectives",
        "nn",
        "memory",
        "numerics",
        "kernels",
        "parallel",
        "train",
        "plan",
        "viz",
        "bench",
        "course",
    ]
    assert [layer.strip("()") for layer in layers] == order[::-1]
