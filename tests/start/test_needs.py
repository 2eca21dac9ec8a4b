"""What can be missing is named with the one thing that mends it."""

import os
import sys

import pytest

from fourwalls_start import needs


def nothing(name):
    return None


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_these_pythons_will_do(minor):
    needs.check_python((3, minor, 0), which=nothing, system=lambda: "Linux", machine=lambda: "x86_64")


def test_too_new_a_python():
    with pytest.raises(needs.Stop, match="This Python is 3.15, too new") as stop:
        needs.check_python((3, 15, 0), which=nothing, system=lambda: "Linux")
    assert stop.value.fix == "install Python 3.13, then run start.py with it"
    with pytest.raises(needs.Stop) as stop:
        needs.check_python((3, 15, 0), which=lambda name: name == "python3.12", system=lambda: "Linux")
    assert stop.value.fix == "run:  python3.12 start.py"


def test_intel_macs_are_sent_to_conda():
    with pytest.raises(needs.Stop, match="Intel Macs") as stop:
        needs.check_python((3, 12, 0), system=lambda: "Darwin", machine=lambda: "x86_64")
    assert "environment.yml" in stop.value.fix
    needs.check_python((3, 12, 0), system=lambda: "Darwin", machine=lambda: "arm64")


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_debian_without_the_venv_module(tmp_path, missing):
    release = tmp_path / "os-release"
    release.write_text('NAME="Ubuntu"\nID_LIKE=debian\n')
    with pytest.raises(needs.Stop, match="venv module is incomplete") as stop:
        needs.check_venv_module(find=lambda name: None if name == missing else name, os_release=str(release))
    assert stop.value.fix == f"sudo apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    with pytest.raises(needs.Stop) as stop:
        needs.check_venv_module(find=nothing, os_release=str(tmp_path / "none"))
    assert "apt" not in stop.value.fix
    needs.check_venv_module(find=lambda name: name, os_release=str(release))


def test_disk(tmp_path):
    usage = type("usage", (), {"free": 2 * 10**9})()
    assert needs.check_disk(tmp_path, 2000, usage=lambda path: usage) == 2000
    with pytest.raises(needs.Stop, match="2,000 MB free; set-up needs about 2,001 MB") as stop:
        needs.check_disk(tmp_path, 2001, usage=lambda path: usage)
    assert stop.value.fix.startswith("free 1 MB there")


def test_writable(tmp_path):
    needs.check_writable(tmp_path)
    with pytest.raises(needs.Stop, match="cannot be written"):
        needs.check_writable(tmp_path / "absent")
    assert not os.path.exists(tmp_path / "absent")
