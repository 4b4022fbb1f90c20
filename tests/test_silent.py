"""No process of ours speaks to anybody on its own account, nor forks to do so: a fork of a thread inherits locks that nobody frees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_repo import environment

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[1]
CI_VARIABLES = {"CI", "TF_BUILD", "JENKINS_URL"}
WATCHED = """
import sys, threading
events = []
sys.addaudithook(lambda event, _: events.append(event) if event in ("os.fork", "socket.connect", "socket.getaddrinfo") else None)
{program}
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join(20)
print("EVENTS", events)
"""
SERVED = """
import types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
import foundation.standalone.long_text, foundation.standalone.preprocess, foundation.standalone.response, foundation.standalone.windows
import triton_repo.cpu_engines.{engine}
for name in ("long_text", "preprocess", "response", "windows"):
    sys.modules[name] = getattr(foundation.standalone, name)
sys.modules["engine"] = triton_repo.cpu_engines.{engine}
import triton_repo.cpu_model
"""


def events(program: str, home: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in CI_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(program=program)],
        cwd=ROOT,
        env={**variables, "HOME": str(home)},  # where OpenVINO keeps that a user said no
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "program",
    [
        "import export.engines.openvino",
        "import export.engines.worker, export.engines.openvino",
        "import export.engines.onnxruntime",
        SERVED.format(engine="openvino"),
        SERVED.format(engine="onnxruntime"),
    ],
    ids=["build", "engine", "onnxruntime", "served by openvino", "served by onnxruntime"],
)
def test_an_engine_tells_nobody_that_it_is_imported(program: str, tmp_path: Path) -> None:
    assert events(program, tmp_path) == "EVENTS []"
    assert list(tmp_path.iterdir()) == []


def test_nor_when_an_environment_is_looked_at(tmp_path: Path) -> None:
    imports = environment._LOOK.split("site =")[0]
    assert "openvino" in imports
    assert "onnxruntime" in imports
    assert events(imports, tmp_path) == "EVENTS []"
    assert list(tmp_path.iterdir()) == []


def test_what_is_watched_would_be_seen(tmp_path: Path) -> None:
    assert events("import os\nif os.fork() == 0:\n    os._exit(0)", tmp_path) == "EVENTS ['os.fork']"
