"""What `start.py` does: set up, open, check, test. Standard library only, since it runs before anything is installed.

It is a package of its own beside `fourwalls`, so that importing it loads no torch and a broken installation can still be
looked at. One command is one function in `commands.py`; every trouble is a `Stop`: one sentence and the one thing that mends it.

    start.py -> commands -> install (needs, torch_build, progress, environment) | check (machine) | parts

Reference: PEP 405, "Python Virtual Environments".
"""

__all__ = []
