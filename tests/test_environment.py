"""environment.yml (conda, Binder) asks for the same packages in the same versions as pyproject.toml, the one place that pins."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fourwalls_start.install import read_pins

ROOT = Path(__file__).resolve().parents[1]
CONDA_NAMES = {"torch": "pytorch", "playwright": "playwright-python"}
MATCH_SPEC = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]*)(?: (?P<bounds>(?:==|>=|<=|!=|~=|<|>)[0-9][^\s]*))?")


def parse(spec):
    """(name, bounds) of a strict conda match spec: `name` or `name ==1.2` or `name >=1,<2`; anything looser is refused.

    `name=1.2` and `name 1.2` mean "any version that starts so" to conda, and have no place among pins.
    """
    found = MATCH_SPEC.fullmatch(spec)
    if not found:
        raise ValueError(f"not a strict match spec: {spec!r}")
    return found["name"], SpecifierSet(found["bounds"] or "")


def differences(conda, pins, conda_names=CONDA_NAMES):
    """What environment.yml's list of dependencies has otherwise than the requirements `pins`, in words."""
    asked = dict(parse(spec) for spec in conda if isinstance(spec, str))
    wanted = {}
    for line in pins:
        requirement = Requirement(line)
        wanted[conda_names.get(requirement.name, requirement.name)] = requirement.specifier
    said = [f"{name} is missing" for name in wanted.keys() - asked.keys()]
    said += [f"{name} is not pinned in pyproject.toml" for name in asked.keys() - wanted.keys()]
    said += [
        f"{name} {asked[name]} is {wanted[name]} in pyproject.toml"
        for name in wanted.keys() & asked.keys()
        if asked[name] != wanted[name]
    ]
    return sorted(said)


@pytest.fixture(scope="module")
def environment():
    return yaml.safe_load((ROOT / "environment.yml").read_text())


@pytest.fixture(scope="module")
def pins():
    groups = read_pins(ROOT)
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    return [line for lines in groups.values() for line in lines] + [f"python{python}"]


def test_environment_agrees_with_the_pins(environment, pins):
    conda = [spec for spec in environment["dependencies"] if spec != "pip"]
    assert differences(conda, pins) == []


def test_pip_in_environment_only_adds_this_library(environment):
    by_pip = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert by_pip == [["--editable ."]]
    assert "pip" in environment["dependencies"]  # conda warns, and may do without, if it is not asked for


def test_only_conda_forge(environment):
    assert environment["channels"] == ["conda-forge", "nodefaults"]  # the only channel that has torch for every chip


def test_every_pin_is_exact(pins):
    loose = [line for line in pins if not line.startswith("python") and not re.fullmatch(r"[A-Za-z0-9_-]+==[0-9.]+", line)]
    assert loose == []


def test_no_package_is_pinned_twice(pins):
    names = [Requirement(line).name.lower().replace("_", "-") for line in pins]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("conda", "says"),
    [
        (["a ==1.0", "pytorch ==2.0"], []),
        (["a ==1.0.1", "pytorch ==2.0"], ["a ==1.0.1 is ==1.0 in pyproject.toml"]),
        (["a >=1.0", "pytorch ==2.0"], ["a >=1.0 is ==1.0 in pyproject.toml"]),
        (["a", "pytorch ==2.0"], ["a  is ==1.0 in pyproject.toml"]),
        (["a ==1.0"], ["pytorch is missing"]),
        (["a ==1.0", "torch ==2.0"], ["pytorch is missing", "torch is not pinned in pyproject.toml"]),
        (["a ==1.0", "pytorch ==2.0", "b ==3"], ["b is not pinned in pyproject.toml"]),
    ],
)
def test_a_difference_is_seen(conda, says):
    assert differences(conda, ["a==1.0", "torch==2.0"]) == says


@pytest.mark.parametrize("spec", ["a=1.0", "a 1.0", "a ==1.0 py311_0", "conda-forge::a ==1.0", "a==1.0", "a >=1, <2", "A ==1"])
def test_a_loose_spec_is_refused(spec):
    with pytest.raises(ValueError, match="not a strict match spec"):
        parse(spec)
