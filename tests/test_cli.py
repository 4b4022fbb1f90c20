"""The command line as its user meets it: exit statuses, one line a problem, quick help."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from typer.testing import CliRunner

from cli import app
from tests.compress.report.test_goals import make_report
from tests.plain_reports import contents, judge

ROOT = Path(__file__).resolve().parent.parent


def compress(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


VERBS_OF_RECIPES = ("plan", "run", "search")
STEPS = """
import contextlib, io, json, sys

def step(name, work):
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            status = work()
    except SystemExit as ended:
        status = ended.code
    loaded[name] = {"status": status, "stderr": errors.getvalue(), "modules": sorted({one.partition(".")[0] for one in sys.modules})}

def command(*arguments):
    sys.argv[1:] = arguments
    import cli
    cli.app()

def every_recipe():
    from pathlib import Path
    from compress.recipe import read
    for path in Path("recipes").glob("*.yaml"):
        read(path)

verbs, loaded = sys.argv[1:], {}
step("cli", lambda: __import__("cli") and None)
for verb in verbs:
    step(verb, lambda: command(verb, "sst2-minilm-distill", "--set", "stages.quantize.mdoe=ptq", "--set", "data.max_lenght=64"))
step("recipes", every_recipe)
for name in ("serve", "verify"):
    step(name, lambda: __import__(f"compress.commands.{name}") and None)
print(json.dumps(loaded))
"""
"""What a process does that says after each step what it has loaded: a process for each would import for seconds."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, dict[str, Any]]:
    """What steps of a process answered, and the modules that were loaded after each."""
    ran = subprocess.run([sys.executable, "-c", STEPS, *VERBS_OF_RECIPES], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_help_needs_no_torch(loaded: dict[str, dict[str, Any]]) -> None:
    assert not {"torch", "transformers", "pydantic", "numpy"} & set(loaded["cli"]["modules"])


def test_the_version_is_that_of_the_installed_package() -> None:
    status, out, _ = compress("--version")
    assert status == 0
    assert out.split() == ["compress", importlib.metadata.version("compress-transformers")]


@pytest.mark.parametrize("command", ["serve", "verify"])
def test_serving_and_verifying_need_no_torch(command: str, loaded: dict[str, dict[str, Any]]) -> None:
    assert loaded[command]["status"] is None
    assert not {"torch", "transformers", "aiohttp"} & set(loaded[command]["modules"])


@pytest.mark.parametrize("verb", VERBS_OF_RECIPES)
def test_a_typo_is_reported_before_torch_is_loaded(verb: str, loaded: dict[str, dict[str, Any]]) -> None:
    assert loaded[verb]["status"] == 2
    assert not {"torch", "transformers", "onnx", "openvino", "scipy", "pandas", "pyarrow"} & set(loaded[verb]["modules"])
    assert "mdoe" in loaded[verb]["stderr"]
    assert "max_lenght" in loaded[verb]["stderr"]


def test_all_shipped_recipes_are_read_without_torch(loaded: dict[str, dict[str, Any]]) -> None:
    assert loaded["recipes"]["status"] is None
    assert not {"torch", "transformers", "onnx", "scipy"} & set(loaded["recipes"]["modules"])


VERBS = "init plan run report compare bench generate serve verify clean list doctor"


@pytest.mark.parametrize("verb", VERBS.split())
def test_every_verb_explains_itself(verb: str) -> None:
    status, out, _ = compress(verb, "--help")
    assert status == 0
    assert "Usage" in out


@pytest.mark.parametrize("verb", ["run", "generate"])
def test_help_with_many_options_ends_in_worked_examples(verb: str) -> None:
    _, out, _ = compress(verb, "--help")
    options, _, examples = out.partition("Examples: ")
    assert "--help" in options
    assert " ".join(examples.split()).count(f"compress {verb} ") >= 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "absent.yaml"), "absent.yaml"),
        (("run", "absent.yaml"), "cannot be read"),
        (("report", "nowhere"), "not a finished run"),
        (("bench", "nowhere"), "not a finished run"),
        (("verify", "nowhere"), "not a finished run"),
        (("serve", "nowhere"), "not a finished run"),
        (("list", "stagse"), "did you mean 'stages'"),
        (("init", "--task", "text-clasification"), "did you mean 'text-classification'"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = compress(*arguments)
    assert status == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_serving_text_from_an_engine_that_does_not_generate_is_refused_in_one_line(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(ROOT / "recipes" / "tinyshakespeare-gpt.yaml", tmp_path / "recipe.yaml")
    status, _, err = compress(verb, "recipe.yaml", "--set", "target.engines=[openvino]")
    assert status == 2
    assert err == (
        "target.engines: openvino given; on the CPU triton_repo serves text-generation with openvino_genai or onnxruntime_decoder: "
        "add one, or leave triton_repo out\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.whole
def test_init_writes_a_recipe_that_reads_and_never_overwrites(tmp_path: Path) -> None:
    from compress.recipe import read
    from foundation.labels.tasks import TASKS

    for task in TASKS:
        path = tmp_path / f"{task}.yaml"
        assert compress("init", "--task", task, "-o", str(path))[0] == 0
        assert read(path).model.task == task
        status, _, err = compress("init", "--task", task, "-o", str(path))
        assert (status, "already exists" in err) == (2, True)


def test_init_copies_a_shipped_recipe(tmp_path: Path) -> None:
    from compress.recipe import read

    path = tmp_path / "mine.yaml"
    status, out, _ = compress("init", "--recipe", "quickstart", "-o", str(path))
    assert (status, out) == (0, f"{path}: edit it, then run: compress plan {path}\n")
    assert read(path) == read(ROOT / "recipes" / "quickstart.yaml")


@pytest.mark.parametrize("arguments", [(), ("--task", "text-classification", "--recipe", "quickstart")])
def test_init_takes_either_a_task_or_a_recipe(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = compress("init", *arguments)
    assert status == 2
    assert err.startswith("init: give either --task TASK or --recipe NAME")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("limit", "status", "goals"), [(0.01, 0, "the goal was met"), (0.001, 3, "1 of 1 goals missed")])
def test_a_run_ends_in_its_figures_its_missed_goals_and_the_path_of_the_report(
    limit: float, status: int, goals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.pipeline import Outcome
    from compress.recipe import Recipe

    asked: list[Recipe] = []

    def run(recipe: Recipe, *arguments: Any, **options: Any) -> Outcome:
        asked.append(recipe)
        report = make_report()
        return Outcome(Path("runs/x"), contents({**report, "goals": judge({"max_drop": limit}, report)}))

    monkeypatch.setattr("compress.pipeline.run", run)
    found, out, _ = compress("run", "quickstart", "--set", "seed=7")
    lines = out.splitlines()
    assert (asked[0].name, asked[0].seed) == ("quickstart", 7)
    assert found == status
    assert [line.split()[0] for line in lines[:4]] == ["accuracy", "speed", "size", "goals"]
    assert lines[3].endswith(goals)
    assert [line.split(";")[0].strip() for line in lines[4:-1]] == ["missed: Accuracy drop of at most 0.10 points"][: status // 3]
    assert lines[-1] == "report      runs/x/report.html"


@pytest.mark.whole
def test_list_and_schema() -> None:
    assert "quantize" in compress("list")[1]
    assert "openvino" in compress("list", "engines")[1]
    tasks = dict(line.split(maxsplit=1) for line in compress("list", "tasks")[1].splitlines())
    assert tasks["text-generation"].startswith("perplexity")
    assert {"accuracy", "f1", "recall:LABEL"} <= set(tasks["text-classification"].split(", "))
    assert "quickstart" in compress("list", "recipes")[1]
    assert '"$schema"' in compress("list", "--schema")[1]
    assert "mse" in compress("list", "methods")[1]


def test_internal_fault_is_status_1_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.commands.list.catalogue", lambda what: 1 / 0)
    status, _, err = compress("list")
    assert status == 1
    assert err.startswith("internal error: ZeroDivisionError")
    assert len(err.strip().splitlines()) == 1


def test_a_library_that_tells_of_a_full_disk_in_words_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(what: str) -> str:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("compress.commands.list.catalogue", fail)
    status, _, err = compress("list")
    assert status == 2
    assert err.startswith("the run folder: No space left on device; free some space")


@pytest.mark.parametrize("number", [5, 13, 27, 28, 30])
def test_full_disk_and_read_only_folder_are_one_line(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(what: str) -> str:
        raise OSError(number, os.strerror(number), "runs/x")

    monkeypatch.setattr("compress.commands.list.catalogue", fail)
    status, _, err = compress("list")
    assert status == 2
    assert err.startswith("runs/x: ")
    assert "--out" in err
    assert len(err.strip().splitlines()) == 1


def test_a_limit_of_file_sizes_that_a_library_hit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(what: str) -> str:
        try:
            raise OSError(27, os.strerror(27), "runs/x/model.safetensors")
        except OSError as error:
            raise RuntimeError("cannot serialize") from error

    monkeypatch.setattr("compress.commands.list.catalogue", fail)
    status, _, err = compress("list")
    assert status == 2
    assert err == (
        "runs/x/model.safetensors: File too large; raise the limit of the file size (ulimit -f) or give another --out DIR; "
        "finished stages are kept\n"
    )


STOPPED = """
import os, signal, sys, time
from pathlib import Path

import compress.commands.list
from cli import app
from foundation.artifacts import artifact

number, swallowed, folder = int(sys.argv[1]), sys.argv[2] == "True", Path(sys.argv[3])
before = signal.getsignal(number)


def work(what):
    with artifact.writing(folder / "a") as temporary:
        (temporary / "half").touch()
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        except KeyboardInterrupt as error:
            if swallowed:  # as libraries do whose modules are being imported
                raise ImportError("initialization failed") from error
            raise
    raise AssertionError("not stopped")


compress.commands.list.catalogue = work
sys.argv = ["compress", "list"]
try:
    app()
finally:
    assert signal.getsignal(number) == before
"""


@pytest.mark.whole
@pytest.mark.parametrize(
    ("number", "swallowed"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_cleans_up(number: signal.Signals, swallowed: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED, str(int(number)), str(swallowed), str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    how = "stopped with SIGTERM" if number == signal.SIGTERM else "stopped"
    assert found.stderr.splitlines() == [f"{how}; finished stages are kept, run the same command to continue"]
    assert found.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
