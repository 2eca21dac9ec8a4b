"""Runs a command where it reaches nothing but what its plan names. Standard library alone: it runs before anything else can.

It joins control groups, takes namespaces of its own (files, processes, network), builds a root of bind mounts, becomes another
user, sets limits, and only then becomes the command; the first process of the namespace reaps, and with it everything ends.

    python -I -S confine.py PLAN COMMAND...        PLAN: a JSON object, each entry of which is one step below

Reference: man pages namespaces(7), mount_namespaces(7), user_namespaces(7), cgroups(7), prctl(2); the design of bubblewrap.
"""

import ctypes
import json
import os
import resource
import signal
import sys

__all__ = ["main"]

NEW = {"mount": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000}
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, MOVE, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 8192, 16384, 1 << 18
STATVFS = ((2, NO_SUID), (4, NO_DEV), (8, NO_EXEC), (1024, 1024), (2048, 2048), (4096, 1 << 21))  # what a remount must keep
SET_DEATH_SIGNAL, SET_NO_NEW_PRIVILEGES = 1, 38
DEVICES = ("null", "zero", "full", "random", "urandom")


def main(arguments: list[str]) -> None:
    """Carry out the plan and become the command. Does not return.

    plan: join (files to write this process's number into), namespaces (names of NEW), root (an empty folder), binds ([[from,
    to]]), tmp and shm (bytes), user (a number), limits ({name: number}), environment, folder.
    """
    plan, command = json.loads(arguments[0]), arguments[1:]
    _on_linux(SET_DEATH_SIGNAL, signal.SIGKILL)
    for path in plan.get("join", ()):
        with open(path, "w") as file:
            file.write("0")
    if plan.get("namespaces"):
        _isolate(plan)
    if plan.get("user") is not None and os.getuid() == 0:
        os.setgroups([])
        os.setgid(plan["user"])
        os.setuid(plan["user"])
    for name, most in plan.get("limits", {}).items():
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    _on_linux(SET_NO_NEW_PRIVILEGES, 1)
    if plan.get("namespaces"):
        _leave_a_reaper()
    _on_linux(SET_DEATH_SIGNAL, signal.SIGKILL)  # becoming another user forgets it
    if plan.get("folder"):
        os.chdir(plan["folder"])
    os.execve(command[0], command, plan.get("environment", dict(os.environ)))


def _isolate(plan):
    """Namespaces, the first process of the new one, and the new root. The caller goes on as that first process."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", sum(NEW[name] for name in plan["namespaces"]))
    if "user" in plan["namespaces"]:
        inside = plan.get("user") or user
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{inside} {user} 1")
        _write("/proc/self/gid_map", f"{inside} {group} 1")
    child = os.fork()
    if child:
        _close_everything()
        _end_like(os.waitpid(child, 0)[1])
    _on_linux(SET_DEATH_SIGNAL, signal.SIGKILL)
    _call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)
    _new_root(plan)


def _new_root(plan):
    root = plan["root"]
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", NO_SUID | NO_DEV, b"mode=755,size=1m")
    for path, most in (("/tmp", plan["tmp"]), ("/dev/shm", plan["shm"])):  # before the binds: a checkout may lie below /tmp
        os.makedirs(root + path, exist_ok=True)
        _call("mount", b"tmpfs", (root + path).encode(), b"tmpfs", NO_SUID | NO_DEV, f"mode=1777,size={most}".encode())
    for source, target in [*plan["binds"], *((f"/dev/{name}", f"/dev/{name}") for name in DEVICES)]:
        _bind(source, root + target)
    os.makedirs(root + "/proc", exist_ok=True)
    _call("mount", b"proc", (root + "/proc").encode(), b"proc", NO_SUID | NO_DEV | NO_EXEC, None)
    os.symlink("/proc/self/fd", root + "/dev/fd")
    _call("mount", None, root.encode(), None, REMOUNT | READ_ONLY | NO_SUID | NO_DEV, b"mode=755,size=1m")
    os.chdir(root)
    _call("mount", b".", b"/", None, MOVE, None)
    os.chroot(".")
    os.chdir("/")


def _bind(source, target):
    """`source` read-only at `target`; a link stays a link."""
    if os.path.islink(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    _call("mount", source.encode(), target.encode(), None, BIND | RECURSIVE, None)
    if not source.startswith("/dev/"):
        kept = sum(flag for seen, flag in STATVFS if os.statvfs(target).f_flag & seen)
        _call("mount", None, target.encode(), None, REMOUNT | BIND | READ_ONLY | NO_SUID | kept, None)


def _leave_a_reaper():
    """Fork: the first process of the namespace waits for its children, and ends with the one that goes on."""
    child = os.fork()
    if not child:
        return
    _on_linux(SET_DEATH_SIGNAL, signal.SIGKILL)
    _close_everything()
    while True:
        ended, status = os.wait()
        if ended == child:
            _end_like(status)


def _close_everything():
    """A process that only waits holds no file of the one that works, so that its end is seen."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.closerange(3, 4096)


def _end_like(status):
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _write(path, text):
    with open(path, "w") as file:
        file.write(text)


def _call(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        shown = [a.decode() for a in arguments if isinstance(a, bytes)]
        raise OSError(number, f"{name} {' '.join(shown)}: {os.strerror(number)}")


def _on_linux(option, value):
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
