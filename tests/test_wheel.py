"""The wheel by itself: built, installed where no checkout is in reach, and used from another folder.

The environment is new but for the dependencies, which are those of the environment that runs the tests: a line in a .pth file names their
folder, so that this costs seconds and no gigabytes. Such a folder is searched last, and its own .pth files (an editable install of this
package) are not read.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("compress", "foundation", "quantize", "distill", "prune", "export", "triton_repo", "cli")
SHRUNK = [
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=48",
    "stages.finetune.epochs=1",
    "stages.triton_repo.serve=false",
    "target={engines: [openvino], batch_sizes: [1], threads: 1}",
]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a folder to work in."""

    wheel: Path
    bin: Path
    folder: Path

    def __call__(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs a program of the environment in the folder, with nothing of ours in reach."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        command = [str(self.bin / program), *arguments]
        return subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False)

    def python(self, code: str) -> str:
        """Returns what a program prints; -P keeps the folder out of sys.path."""
        done = self("python", "-P", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-qq", "--no-deps", "--wheel-dir", str(base / "dist"), str(ROOT)], check=True)
    [wheel] = (base / "dist").glob("*.whl")
    venv.create(base / "venv")
    python = base / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "-qq", "--no-deps", "--no-index", str(wheel)], check=True)
    paths = {"base": str(base / "venv"), "platbase": str(base / "venv")}
    Path(sysconfig.get_path("purelib", "venv", paths), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (base / "work").mkdir()
    return Installed(wheel, python.parent, base / "work")


def test_the_wheel_holds_what_is_not_python(installed: Installed) -> None:
    inside = set(zipfile.ZipFile(installed.wheel).namelist())
    assert {f"compress/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")} <= inside
    docker = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docker").rglob("*") if path.is_file()]
    assert {f"triton_repo/{path}" for path in docker} <= inside
    assert {f"compress/report/templates/{path.name}" for path in (ROOT / "compress" / "report" / "templates").iterdir()} <= inside
    assert {f"{name}/py.typed" for name in NAMES if name != "cli"} <= inside
    assert {"triton_repo/server-requirements.txt", "triton_repo/server-additions.txt"} <= inside
    tops = {name.split("/")[0] for name in inside if ".dist-info" not in name}
    assert tops == {"cli.py", *NAMES} - {"cli"}


def test_what_is_imported_is_the_wheel(installed: Installed) -> None:
    files = installed.python(f"import importlib; [print(importlib.import_module(name).__file__) for name in {NAMES!r}]").splitlines()
    assert len(files) == len(NAMES)
    assert all(Path(file).is_relative_to(installed.bin.parent) for file in files), files


def test_every_top_level_name_is_ours_alone(installed: Installed) -> None:
    code = "import importlib.metadata, json; print(json.dumps(importlib.metadata.packages_distributions()))"
    owners = json.loads(installed.python(code))
    assert {name: set(owners[name]) for name in NAMES} == {name: {"compress-transformers"} for name in NAMES}


def test_help_init_and_list_work_anywhere(installed: Installed) -> None:
    assert "compress run quickstart" in " ".join(installed("compress", "--help").stdout.split())
    listed = installed("compress", "list", "recipes").stdout.splitlines()
    assert sorted(line.split()[0] for line in listed) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    for arguments in (["--task", "text-classification", "-o", "task.yaml"], ["--recipe", "quickstart", "-o", "copy.yaml"]):
        done = installed("compress", "init", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
    code = (
        "from compress.api import load_recipe; print(load_recipe('copy.yaml') == load_recipe('quickstart'), load_recipe('task.yaml').name)"
    )
    assert installed.python(code) == "True my-classifier"


def test_the_quickstart_runs_anywhere(installed: Installed) -> None:
    done = installed("compress", "run", "quickstart", *(word for setting in SHRUNK for word in ("--set", setting)))
    assert done.returncode in (0, 3, 4), done.stderr
    *_, last = done.stdout.splitlines()
    assert last.split() == ["report", "runs/quickstart/report.html"]
    run = installed.folder / "runs" / "quickstart"
    assert "<style>" in (run / "report.html").read_text()
    assert (run / "model_repository").is_dir()
    verified = installed("compress", "verify", "runs/quickstart")
    assert (verified.returncode, verified.stderr) == (0, "")
