"""A run as a trace: what a collector of OpenTelemetry gets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.commands.plan import plan
from compress.pipeline import run
from compress.recipe import Recipe, check
from compress.track.note import Status
from compress.track.trace_runs import FILE, TraceRuns
from compress.track_settings import Track
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.collector import Collector, collecting
from tests.compress.track.tiny_run import RAW, STEPS

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside", "no_clocks")]

SILENT = ConsoleProgress("silent")
VARIABLES = ("SDK_DISABLED", "SERVICE_NAME", "RESOURCE_ATTRIBUTES", "TRACES_SAMPLER", "EXPORTER_OTLP_HEADERS", "EXPORTER_OTLP_PROTOCOL")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(f"OTEL_{variable}" for variable in VARIABLES), "TRACEPARENT", "TRACESTATE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))


def recipe(url: str, **more: Any) -> Recipe:
    return check({**RAW, "track": {"otlp": url}, **more})


def test_a_run_is_a_trace_and_a_resumed_run_links_to_it(collector: Collector, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret-key")
    outcome = run(recipe(collector.url), folder, start="latency", progress=SILENT)
    root = collector.named("compress run")
    steps = {span.name: span for span in collector.spans if span.name != root.name}
    assert steps.keys() == STEPS
    assert (root.service, root.parent, root.links, root.failed) == ("compress", "", [], False)
    assert {(span.trace, span.parent) for span in steps.values()} == {(root.trace, root.id)}
    assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in steps.values())
    assert root.attributes["compress.status"] == "finished"
    assert root.attributes["compress.run.name"] == "tiny"
    cached = {name: span.attributes["compress.cached"] for name, span in steps.items()}
    assert cached == {stage.id: stage.cached for stage in outcome.contents.stages}
    assert (cached["finetune"], cached["latency"]) == (True, False)
    latency, stage = steps["latency"], next(stage for stage in outcome.contents.stages if stage.id == "latency")
    assert latency.attributes["compress.seconds"] == pytest.approx(stage.seconds, abs=1e-3), "report.json rounds"
    assert latency.attributes["compress.peak_memory_bytes"] == stage.peak_memory_bytes
    assert latency.end_ns - latency.start_ns >= 1e9 * latency.attributes["compress.seconds"]
    assert steps["finetune"].end_ns == steps["finetune"].start_ns, "nothing ran"
    assert (folder / "stages" / latency.attributes["compress.artifact.folder"]).is_dir()
    assert len(latency.attributes["compress.artifact.digest"]) == 64
    assert collector.headers[0]["authorization"] == "Bearer secret-key"
    assert not [path for path in folder.rglob("*") if path.is_file() and b"secret-key" in path.read_bytes()]
    assert FILE not in {entry.path for entry in outcome.contents.integrity.files}

    collector.spans.clear()
    again = run(recipe(collector.url), folder, progress=SILENT)
    assert all(stage.cached for stage in again.contents.stages), "track is no part of a cache key"
    resumed = collector.named("compress run")
    assert resumed.trace != root.trace
    assert resumed.links == [(root.trace, root.id)]


def begun(url: str, folder: Path, name: str = "tiny", progress: ConsoleProgress = SILENT) -> TraceRuns:
    folder.mkdir(exist_ok=True)
    return TraceRuns.begun({"name": name}, Track(otlp=url), folder, progress)


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_failed_run_ends_as_failed_and_so_does_its_step(status: Status, collector: Collector, tmp_path: Path) -> None:
    traced = begun(collector.url, tmp_path)
    traced.started("export")
    traced.ended(status)
    root, export = collector.named("compress run"), collector.named("export")
    assert (root.failed, root.attributes["compress.status"]) == (True, status.lower())
    assert (export.failed, export.attributes["compress.status"], export.parent) == (True, status.lower(), root.id)


def test_another_recipe_or_collector_is_another_run(collector: Collector, tmp_path: Path) -> None:
    begun(collector.url, tmp_path).finished()
    begun(collector.url, tmp_path, "other").finished()
    assert [span.links for span in collector.spans] == [[], []]
    (tmp_path / FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        begun(collector.url, tmp_path)
    assert "remove the file" in caught.value.problems[0].remedy


@pytest.mark.parametrize(
    ("value", "is_child"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", None),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("nonsense", False),
    ],
)
def test_a_trace_of_the_environment_is_the_parent(
    value: str, is_child: bool | None, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", value)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    begun(collector.url, tmp_path).finished()
    if is_child is None:
        assert collector.spans == [], "the caller does not sample"
        return
    root = collector.named("compress run")
    assert root.service == "nightly"
    assert (root.trace == "0af7651916cd43dd8448eb211c80319c", root.parent == "b7ad6b7169203331") == (is_child, is_child)


def test_a_collector_that_is_away_or_never_answers_costs_a_warning(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("compress.track.trace_runs.CLOSE_SECONDS", 0.2)
    collector.open.clear()  # until the end of the test
    for url in ("http://127.0.0.1:9", collector.url):
        begun(url, tmp_path, progress=ConsoleProgress("quiet")).finished()
        assert "did not take every span" in capsys.readouterr().err


def test_what_is_missing_is_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.pipeline.prepare", lambda *arguments: pytest.fail("nothing may run"))
    works = (
        lambda: plan(recipe("http://127.0.0.1:9"), tmp_path / "a"),
        lambda: run(recipe("http://127.0.0.1:9"), tmp_path / "a", progress=SILENT),
    )
    for variables, key, word in (
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL", "4318"),
        ({}, "track.otlp", "[otlp]"),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            if not variables:
                patch.setattr("foundation.core.otlp.PACKAGES", ("no-such-package",))
            for work in works:
                with pytest.raises(InputError) as caught:
                    work()
                [problem] = caught.value.problems
                assert problem.key == key
                assert word in str(problem)
