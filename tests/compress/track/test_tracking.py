"""A whole run in MLflow, in a database file, read back with MLflow's own client."""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from compress.commands.plan import plan
from compress.commands.track import track
from compress.pipeline import Outcome, run
from compress.recipe import Recipe, check
from compress.search.search import search
from compress.track.names import figures
from compress.track.note import MlflowNote, read_note
from compress.track_settings import Track
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.compress.search.tiny import tiny_search
from tests.compress.track.tiny_run import RAW, STEPS

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside", "no_clocks")]


@dataclass(frozen=True)
class Place:
    """A database file of MLflow, and a run folder."""

    uri: str
    client: MlflowClient
    folder: Path

    def recipe(self, experiment: str, **more: Any) -> Recipe:
        return check({**RAW, "track": {"mlflow": self.uri, "experiment": experiment}, **more})

    def runs(self, experiment: str) -> list[Run]:
        known = self.client.get_experiment_by_name(experiment)
        return list(self.client.search_runs([known.experiment_id])) if known else []

    def roots(self, experiment: str) -> list[Run]:
        return [one for one in self.runs(experiment) if "mlflow.parentRunId" not in one.data.tags]

    def nested(self, experiment: str) -> dict[str, Run]:
        [root] = self.roots(experiment)
        return {one.info.run_name: one for one in self.runs(experiment) if one.data.tags.get("mlflow.parentRunId") == root.info.run_id}


@pytest.fixture(scope="module")
def place(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("tracked")
    shutil.copytree(finished_run, root / "run", symlinks=True)
    uri = f"sqlite:///{root / 'mlflow.db'}"
    return Place(uri, MlflowClient(tracking_uri=uri), root / "run")


@pytest.fixture(scope="module")
def tracked(place: Place) -> Outcome:
    """The finished run with `track`."""
    return run(place.recipe("whole"), place.folder, progress=ConsoleProgress("silent"))


def test_a_run_is_one_run_with_its_steps_as_nested_runs(place: Place, tracked: Outcome) -> None:
    assert all(stage.cached for stage in tracked.contents.stages), "track is no part of a cache key"
    [root] = place.roots("whole")
    nested = place.nested("whole")
    assert (root.info.run_name, root.info.status) == ("tiny", "FINISHED")
    assert nested.keys() == STEPS == {stage.id for stage in tracked.contents.stages}
    assert {one.info.status for one in nested.values()} == {"FINISHED"}
    assert all(one.info.end_time - one.info.start_time == int(1000 * one.data.metrics["seconds"]) for one in nested.values())
    assert nested["finetune"].data.params["learning_rate"] == "0.001"
    assert root.data.params["stages/finetune/epochs"] == "0.05"
    assert not any(key.startswith("track") for key in root.data.params)


def test_every_figure_is_there(place: Place, tracked: Outcome) -> None:
    [root] = place.roots("whole")
    contents = tracked.contents
    flat = figures(contents)
    assert len(flat.numbers) > 200
    assert root.data.metrics == flat.numbers
    assert flat.texts.items() <= root.data.tags.items()
    accuracy = contents.variants[-1].accuracy["openvino"].value
    assert root.data.metrics["variants/finetune/accuracy/openvino/value"] == accuracy
    assert place.nested("whole")["finetune"].data.metrics["accuracy/openvino/value"] == accuracy


def test_report_and_served_model_are_artifacts(place: Place, tracked: Outcome, tmp_path: Path) -> None:
    [root] = place.roots("whole")
    assert tracked.contents.served is not None
    for name in ("report.json", "report.html", f"model/{tracked.contents.served.variant}-{tracked.contents.served.precision}/openvino.xml"):
        path = Path(place.client.download_artifacts(root.info.run_id, name, str(tmp_path)))
        assert path.stat().st_size > 0
        if "/" not in name:
            assert path.read_bytes() == (place.folder / name).read_bytes()
    assert (place.folder.parent / "mlartifacts").is_dir(), "next to the database, and not where the command runs"


def test_a_resumed_run_stays_one_run_and_nothing_is_sent_twice(place: Place, tracked: Outcome) -> None:
    before = place.roots("whole")[0].info.run_id
    again = run(place.recipe("whole"), place.folder, progress=ConsoleProgress("silent"))
    [root] = place.roots("whole")
    assert root.info.run_id == before
    assert root.info.status == "FINISHED"
    assert len(place.runs("whole")) == 1 + len(STEPS)
    assert len(place.client.get_metric_history(before, "variants/finetune/parameters")) == 1
    assert root.data.tags["created"] == again.contents.created
    assert MlflowNote.FILE not in {entry.path for entry in again.contents.integrity.files}


def test_a_failed_run_ends_as_failed_and_so_does_its_step(place: Place, tracked: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr("export.export.Export.run", fail)
    with pytest.raises(ValueError, match="no room"):
        run(place.recipe("failed"), place.folder, start="export", progress=ConsoleProgress("silent"))
    [root] = place.roots("failed")
    assert root.info.status == "FAILED"
    before = dict.fromkeys(STEPS - {"export", "latency"}, "FINISHED")
    assert {name: one.info.status for name, one in place.nested("failed").items()} == before | {"export": "FAILED"}
    monkeypatch.undo()
    run(place.recipe("failed"), place.folder, progress=ConsoleProgress("silent"))
    [resumed] = place.roots("failed")
    assert (resumed.info.run_id, resumed.info.status) == (root.info.run_id, "FINISHED")
    assert {one.info.status for one in place.nested("failed").values()} == {"FINISHED"}


def test_a_stopped_run_ends_as_killed(place: Place, tracked: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("export.export.Export.run", stop)
    with pytest.raises(KeyboardInterrupt):
        run(place.recipe("stopped"), place.folder, start="export", progress=ConsoleProgress("silent"))
    assert [one.info.status for one in place.roots("stopped")] == ["KILLED"]
    assert place.nested("stopped")["export"].info.status == "KILLED"


def test_a_search_tracks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(recipe: Recipe, *arguments: Any) -> None:
        assert recipe.track is None
        raise InputError("search", "seen")

    monkeypatch.setattr("compress.search.setup.Setup.of", checked)
    recipe = tiny_search().model_copy(update={"track": Track(mlflow="http://127.0.0.1:9")})
    with pytest.raises(InputError, match="seen"):
        search(recipe, tmp_path / "search")


def test_another_recipe_is_another_run(place: Place, tracked: Outcome) -> None:
    for seed in (1, 2):
        with pytest.raises(InputError):
            run(place.recipe("seeds", seed=seed, goals={"metric": "bleu"}), place.folder, progress=ConsoleProgress("silent"))
    assert [one.info.status for one in place.roots("seeds")] == ["FAILED", "FAILED"]


def away(after: int) -> Callable[..., None]:
    """Returns what a client does whose server goes away after some requests."""
    original, requests = MlflowClient.log_batch, iter(range(after))

    def log_batch(self: MlflowClient, *arguments: Any, **more: Any) -> None:
        if next(requests, None) is None:
            raise MlflowException("the server is away")
        original(self, *arguments, **more)

    return log_batch


def test_a_server_that_goes_away_loses_nothing(
    place: Place, tracked: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MlflowClient, "log_batch", away(after=3))
    outcome = run(place.recipe("away"), place.folder, progress=ConsoleProgress("quiet"))
    assert "compress track" in capsys.readouterr().err
    assert not any("tracking" in warning for warning in outcome.contents.warnings)
    assert [one.info.status for one in place.roots("away")] == ["RUNNING"]
    with pytest.raises(InputError, match=r"track\.mlflow"):
        track(place.folder, progress=ConsoleProgress("silent"))
    monkeypatch.undo()
    line = track(place.folder, progress=ConsoleProgress("silent"))
    [root] = place.roots("away")
    assert root.info.run_id in line
    assert root.info.status == "FINISHED"
    assert root.data.metrics == figures(outcome.contents).numbers
    assert {name: one.info.status for name, one in place.nested("away").items()} == dict.fromkeys(STEPS, "FINISHED")
    assert track(place.folder, progress=ConsoleProgress("silent")) == line


def test_a_run_that_the_server_lost_is_sent_again(place: Place, tracked: Outcome) -> None:
    run(place.recipe("lost"), place.folder, progress=ConsoleProgress("silent"))
    [root] = place.roots("lost")
    place.client.delete_run(root.info.run_id)
    track(place.folder, progress=ConsoleProgress("silent"))
    [again] = [one for one in place.roots("lost") if one.info.lifecycle_stage == "active"]
    assert again.data.metrics == root.data.metrics
    assert len(place.nested("lost")) == len(STEPS)


def test_a_killed_run_ends_as_killed(place: Place, tracked: Outcome) -> None:
    run(place.recipe("killed"), place.folder, progress=ConsoleProgress("silent"))
    note = json.loads((place.folder / MlflowNote.FILE).read_text(encoding="utf-8"))
    note["run"] |= {"status": "RUNNING", "sent": "RUNNING", "ended_ms": None}
    note["steps"]["latency"] |= {"status": "RUNNING", "sent": "RUNNING", "ended_ms": None}
    (place.folder / MlflowNote.FILE).write_text(json.dumps(note), encoding="utf-8")
    track(place.folder, progress=ConsoleProgress("silent"))
    assert [one.info.status for one in place.roots("killed")] == ["KILLED"]
    assert place.nested("killed")["latency"].info.status == "KILLED"


def test_a_finished_run_can_be_sent_later(place: Place, tracked: Outcome, tmp_path: Path) -> None:
    (place.folder / MlflowNote.FILE).unlink()
    with pytest.raises(InputError) as caught:
        track(place.folder)
    assert "--mlflow" in caught.value.problems[0].remedy
    track(place.folder, place.uri, "later", ConsoleProgress("silent"))
    [root] = place.roots("later")
    contents = json.loads((place.folder / "report.json").read_text(encoding="utf-8"))
    assert root.data.metrics["variants/finetune/parameters"] == contents["variants"][0]["parameters"]
    assert place.nested("later").keys() == STEPS
    with pytest.raises(InputError):
        track(tmp_path / "none", place.uri)
    assert not (tmp_path / "none").exists()


def test_a_server_that_does_not_answer_is_found_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("compress.pipeline.prepare", lambda *arguments: pytest.fail("nothing may run"))
    recipe = check({**RAW, "track": {"mlflow": "http://127.0.0.1:9"}})
    for work in (lambda: plan(recipe, tmp_path / "a"), lambda: run(recipe, tmp_path / "a", progress=ConsoleProgress("silent"))):
        with pytest.raises(InputError) as caught:
            work()
        [problem] = caught.value.problems
        assert problem.key == "track.mlflow"
        assert "Connection refused" in problem.given
    assert read_note(tmp_path / "a", MlflowNote) is None


class Refusing(BaseHTTPRequestHandler):
    """A server that asks for a password, and notes what it is given."""

    given: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.given.append(self.headers.get("Authorization"))
        self.send_error(401)

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


def test_credentials_come_from_the_environment_and_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        with pytest.raises(InputError) as caught:
            plan(check({**RAW, "track": {"mlflow": f"http://127.0.0.1:{server.server_port}"}}), tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    [line] = caught.value.lines
    assert Refusing.given[-1] == "Basic " + base64.b64encode(b"me:hunter2").decode()
    assert "401" in line
    assert "hunter2" not in line
    assert str(Refusing.given[-1]).split()[1] not in line
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_credentials_of_the_environment_stand_in_no_file(place: Place, tracked: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {name: f"secret-{name}" for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run(place.recipe("secret"), place.folder, start="latency", progress=ConsoleProgress("silent"))
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    assert {"recipe.lock.yaml", "log.txt", "report.json", "report.html", MlflowNote.FILE} <= {path.name for path in files}
    assert not [path for path in files for value in secrets.values() if value.encode() in path.read_bytes()]


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        plan(check({**RAW, "track": {"mlflow": "http://127.0.0.1:9"}}), tmp_path)
    assert "[track]" in caught.value.problems[0].remedy
