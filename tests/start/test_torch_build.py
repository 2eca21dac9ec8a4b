"""Which torch: the CPU build unless a driver answers; the CPU index beside the usual one, never instead of it."""

import socket
import sys
import threading
import time

import pytest

from fourwalls_start import needs, torch_build

PIN = "torch==2.13.0"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)


def test_cpu_on_linux_asks_the_cpu_index_besides():
    assert torch_build.requirement("cpu", PIN, "Linux", lambda url: True) == (
        [PIN, "--extra-index-url", torch_build.CPU_INDEX],
        "",
    )


def test_cpu_on_linux_where_that_index_does_not_answer_says_how_large_it_may_get():
    words, said = torch_build.requirement("cpu", PIN, "Linux", lambda url: False)
    assert words == [PIN]
    assert "3 GB" in said


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_cpu_elsewhere_is_the_usual_build(system):
    assert torch_build.requirement("cpu", PIN, system, lambda url: pytest.fail("asked for nothing")) == ([PIN], "")


def test_a_store_of_wheels_is_not_left_for_the_network(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert torch_build.requirement("cpu", PIN, "Linux", lambda url: pytest.fail("asked for nothing")) == ([PIN], "")


def test_cuda_refuses_the_cpu_build_of_the_same_version():
    assert torch_build.requirement("cuda", PIN, "Linux") == (["torch==2.13.0,!=2.13.0+cpu"], "")


@pytest.mark.parametrize(("system", "fix"), [("Darwin", "leave --torch out"), ("Windows", "WSL")])
def test_cuda_where_there_is_none(system, fix):
    with pytest.raises(needs.Stop) as stop:
        torch_build.requirement("cuda", PIN, system)
    assert fix in stop.value.fix


def test_a_server_that_takes_the_call_but_never_answers_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        assert torch_build.reachable(f"http://127.0.0.1:{silent.getsockname()[1]}/", 0.3) is False
        assert time.monotonic() - start < 3


def test_a_name_look_up_without_end_is_not_waited_for(monkeypatch):
    looking = threading.Event()
    monkeypatch.setattr(torch_build.urllib.request, "urlopen", lambda url, timeout: looking.wait(20))
    start = time.monotonic()
    assert torch_build.reachable("http://nowhere/", 0.2) is False
    assert time.monotonic() - start < 5
    looking.set()


def test_a_server_that_answers_is_reachable():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert torch_build.reachable(f"http://127.0.0.1:{server.getsockname()[1]}/", 10) is True
        thread.join()


def test_no_driver_file_and_no_tool(tmp_path):
    assert torch_build.has_nvidia_driver(which=lambda name: None, proc=str(tmp_path / "none")) is False


@pytest.mark.parametrize(
    ("script", "found"), [("echo GPU 0: H100", True), ("echo no devices; exit 1", False), ("echo nothing", False)]
)
def test_the_tool_decides(tmp_path, script, found):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert torch_build.has_nvidia_driver(which=lambda name: str(tool), proc=str(tmp_path / "none")) is found


def test_a_driver_file_is_enough(tmp_path):
    (tmp_path / "version").write_text("")
    assert torch_build.has_nvidia_driver(which=lambda name: None, proc=str(tmp_path / "version")) is True


def test_existing_torch_is_found_where_it_is(tmp_path):
    python = tmp_path / "python"
    folder = tmp_path / "site"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("print('a greeting'); __version__ = '2.9.0+cu130'")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    version, where, _ = torch_build.existing_torch(str(python))
    assert (version, where) == ("2.9.0+cu130", str(folder))


def test_existing_torch_that_is_not_there(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(needs.Stop, match="has no torch that loads"):
        torch_build.existing_torch(str(python))
