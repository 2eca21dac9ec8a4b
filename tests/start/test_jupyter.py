"""A learner's JupyterLab has none of what only teachers need, although it is installed in the same place."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASKS = """
import json
from jupyter_core.paths import jupyter_config_path
from jupyter_server.extension.config import ExtensionConfigManager
from jupyterlab_server.config import get_page_config
servers = ExtensionConfigManager(read_config_path=jupyter_config_path()).get_jpserver_extensions()
print(json.dumps([servers, get_page_config([])["disabledExtensions"]]))
"""


def extensions(**environment):
    """({server extension: whether it starts}, [lab extensions that are off]) as Jupyter finds them."""
    env = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1", **environment}
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def test_what_only_teachers_need_is_off_where_start_py_opens_jupyterlab():
    servers, off = extensions(JUPYTER_CONFIG_PATH=str(ROOT / "utils" / "fourwalls_start" / "jupyter"))
    teachers = {name: on for name, on in servers.items() if name.startswith(("nbgrader", "notebook"))}
    teachers.pop("notebook_shim", None)
    assert teachers and not any(teachers.values()), teachers
    assert servers["jupyterlab"] and {"@jupyter/nbgrader", "@jupyter-notebook/lab-extension"} <= set(off)


def test_elsewhere_it_is_on_so_that_the_formgrader_opens():
    servers, _ = extensions(JUPYTER_CONFIG_PATH="")
    assert servers["nbgrader.server_extensions.formgrader"]
