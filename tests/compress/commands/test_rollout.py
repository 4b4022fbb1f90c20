"""A run that is served, rolled over to another and checked from outside.

python -m pytest -m slow tests/compress/commands/test_rollout.py
"""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.commands.rollout import answer, rollout
from compress.commands.verify import verify
from compress.pipeline import run
from compress.recipe import check
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.tiny_recipes import tiny_vit
from triton_repo.control import Control
from triton_repo.deployment import deploy, models_in, repository_of
from triton_repo.service import Service
from triton_repo.serving import server_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RAW: dict[str, Any] = {
    **tiny_vit("tiny"),
    "target": {"engines": ["openvino"], "batch_sizes": [1]},
    "stages": [
        {"finetune": {"epochs": 0.2, "learning_rate": 1e-3}},
        {"export": {"float_precision": "fp32"}},
        {"triton_repo": {"concurrency": [1]}},
    ],
}
MODEL = "tiny"
"""What clients call the model; its name in the run is `BUILD`."""
BUILD = "finetune-fp32"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs whose models answer differently: one has another seed."""
    root, quiet = tmp_path_factory.mktemp("runs"), ConsoleProgress("quiet")
    return (
        run(check(RAW), root / "first", progress=quiet).folder,
        run(check({**RAW, "seed": 1}), root / "second", progress=quiet).folder,
    )


@pytest.fixture(scope="module")
def running(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    models = models_in(runs[0])
    service = server_of(repository_of(runs[0]), tmp_path_factory.mktemp("log") / "log", models=models)
    with Control(runs[0], lambda request, say: answer(service, models, request, say)), service:
        yield service


def test_rolled_over_from_outside_and_checked(runs: tuple[Path, Path], running: Service, tmp_path: Path) -> None:
    first, second = runs
    for url in (running.grpc_address, f"http://{running.http_address}"):
        assert verify(first, live=True, url=url, log=lambda line: None) == []
        lines = verify(second, live=True, url=url, log=lambda line: None)  # the other model answers
        assert any(problem.key == f"{BUILD}.triton" for problem in lines), lines
    damaged = tmp_path / "damaged"
    shutil.copytree(second, damaged, symlinks=True)
    [weights] = damaged.glob(f"stages/triton_repo-*/model_repository/{BUILD}/1/openvino.bin")
    weights.write_bytes(weights.read_bytes()[::-1])
    for folder, wanted, message in (
        (damaged, None, "openvino.bin"),
        (second, "other", "and other is to be rolled over; give a run that has it"),
        (tmp_path / "nothing", None, "nothing"),
    ):
        with pytest.raises(InputError, match=message):
            rollout(first, folder, model=wanted, log=lambda line: None)
    said: list[str] = []
    done = rollout(first, second, log=said.append)
    assert MODEL in [one["model"] for one in done["models"]]  # and its bf16 build where the processor has that
    assert {(one["before"], one["after"]) for one in done["models"]} == {("1", "2")}
    assert any("64 golden rows, 0 flips" in line for line in said)
    assert verify(second, live=True, url=running.grpc_address, log=lambda line: None) == []
    assert verify(first, live=True, url=running.grpc_address, log=lambda line: None) != []
    assert running.deaths == 0
    with pytest.raises(InputError, match="is not being served"):
        rollout(second, first)


def test_rolled_over_to_a_deployment_with_a_warning_of_missed_goals(runs: tuple[Path, Path], running: Service, tmp_path: Path) -> None:
    said: list[str] = []
    out = deploy(runs[1], tmp_path / "out", said.append, missed=["missed: max_size_mb at most 1; measured 2"])
    assert [path.parent.name for path in out.glob("model_repository/*/config.pbtxt")] == [MODEL]
    done = rollout(runs[0], out, model=BUILD, log=said.append)  # by the name that it had before
    assert [one["model"] for one in done["models"]] == [MODEL]
    assert f"warning: {out}: missed: max_size_mb at most 1; measured 2" in said
    assert any("64 golden rows, 0 flips" in line for line in said)
    assert verify(runs[1], live=True, url=running.grpc_address, log=lambda line: None) == []


def test_answers_that_are_not_those_of_the_run_are_not_served(runs: tuple[Path, Path], running: Service, monkeypatch) -> None:
    """The golden rows of one run, and the model of the other: the check fails, and what is served stays."""
    import compress.commands.rollout as command

    before = running._live.version(MODEL)
    rows, recorded = command.evaluations.read_golden(runs[1] / "golden.safetensors")
    shifted = {key: value + 1 for key, value in recorded.items()}
    monkeypatch.setattr(command.evaluations, "read_golden", lambda path: (rows, shifted))
    with pytest.raises(InputError, match="the version before is served as it was"):
        rollout(runs[0], runs[1], log=lambda line: None)
    assert running._live.version(MODEL) == before
    monkeypatch.undo()
    assert threading.active_count() > 1  # the control socket still listens
    assert rollout(runs[0], runs[1], log=lambda line: None)["models"]


def test_url_needs_live(runs: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="--url x: given without --live"):
        verify(runs[0], url="x")
