"""The pipeline end to end on a tiny ViT: artifacts, cache, damage, report, verify, clean. The server has tests of its own."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from compress.commands.clean import clean
from compress.commands.plan import describe
from compress.commands.verify import verify
from compress.compare.document import compare
from compress.events.progress import EventProgress
from compress.events.stdout import EventStream
from compress.forecast import steps_of
from compress.pipeline import Outcome, run
from compress.recipe import Recipe, check
from compress.run.durations import history_file
from compress.run.prepare import prepare
from compress.run.speed import Speed
from compress.run.steps import plan_steps
from foundation.artifacts import artifact
from foundation.artifacts.run_folder import locked, open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.measure import latency
from foundation.measure.fastest import FAR, NEGLIGIBLE_MS
from foundation.measure.race import BLOCKS
from tests import without_clocks
from tests.compress.events.test_events import read as read_events
from tests.engines_inside import inside
from tests.tiny_recipes import tiny_vit

pytestmark = pytest.mark.whole

RAW: dict[str, Any] = {
    **tiny_vit("tiny"),
    "target": {"engines": ["openvino"], "batch_sizes": [1]},
    "stages": [{"finetune": {"epochs": 0.2, "learning_rate": 1e-3}}, {"quantize": {"calibration": {"rows": 64}}}, {"export": {}}],
}


@pytest.fixture(scope="module", autouse=True)
def _no_bf16() -> Iterator[None]:
    """Fewer engines: starting each takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("export.engines.openvino.computes_bf16", lambda: False)
        yield


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return check(RAW)


@pytest.fixture(scope="module")
def events() -> BytesIO:
    """The stream that the events of `finished` are written to."""
    return BytesIO()


@pytest.fixture(scope="module")
def finished(recipe: Recipe, events: BytesIO, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with pytest.MonkeyPatch.context() as patch, inside():
        without_clocks.hurry(patch)  # engines are timed in processes of their own, for a moment; `test_export` evaluates them in processes
        patch.setattr("foundation.measure.latency.measure", partial(in_processes, latency.measure))
        return run(recipe, tmp_path_factory.mktemp("runs") / "tiny", progress=EventProgress(EventStream(events)))


def in_processes(measure: Callable[..., Any], jobs: Sequence[Any], *arguments: Any) -> Any:
    """Calls a function whose engines open in processes of their own, but for the second in torch, which takes seconds to start."""
    with inside(outside=[number for number, job in enumerate(jobs) if number == 0 or job.labels["engine"] != "torch"]):
        return measure(jobs, *arguments)


@pytest.fixture
def copy(finished: Outcome, tmp_path: Path) -> Path:
    shutil.copytree(finished.folder, tmp_path / "tiny", symlinks=True)
    return tmp_path / "tiny"


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test of what is built again: nothing is timed, and engines open in its process."""
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    with inside():
        yield


def lines_of(folder: Path) -> Iterator[str]:
    yield from (folder / "log.txt").read_text().splitlines()


def test_steps_hold_the_implicit_ones(recipe: Recipe) -> None:
    ids = [step.id for step in plan_steps(recipe)]
    assert ids == ["model", "finetune", "evaluate-finetune", "quantize", "evaluate-quantize", "export", "latency"]


def test_events_say_what_ran_what_was_cached_and_what_came_of_it(finished: Outcome, recipe: Recipe, events: BytesIO, copy: Path) -> None:
    resumed = BytesIO()
    run(recipe, copy, progress=EventProgress(EventStream(resumed)))
    ids = [str(step.id) for step in plan_steps(recipe)]
    for stream, folder, cached in ((events, finished.folder, False), (resumed, copy, True)):
        written = read_events(stream)
        (start,) = (event for event in written if event["event"] == "run_started")
        assert (start["name"], start["folder"], start["stages"]) == ("tiny", str(folder), ids)
        marks = [(event["event"], event["stage"]) for event in written if event["event"].startswith("stage_")]
        assert marks == [(mark, stage) for stage in ids for mark in ("stage_started", "stage_finished")]
        ended = {event["stage"]: event for event in written if event["event"] == "stage_finished"}
        assert {stage: event["cached"] for stage, event in ended.items()} == dict.fromkeys(ids, cached)
        figures = {event["stage"]: event for event in written if event["event"] == "figures" and "label" not in event}
        for stage, made in open_run(folder).artifacts.items():
            assert (ended[stage]["seconds"], ended[stage]["folder"]) == (made.manifest["seconds"], str(made.path.absolute()))
            assert figures[stage]["figures"].keys() <= made.metrics.keys()
        assert figures["evaluate-quantize"]["figures"]["metrics"] == open_run(folder).artifacts["evaluate-quantize"].metrics["metrics"]
        assert {row["engine"] for row in figures["latency"]["latency"]} == {"torch", "openvino"}
        epochs = [event["figures"] for event in written if event["event"] == "figures" and event.get("label") == "finetune"]
        assert len(epochs) == (0 if cached else 1)
        assert all(epoch["loss"] > 0 and epoch["step"] == epoch["steps"] for epoch in epochs)
        assert any(event["event"] == "progress" and event["label"] == "finetune" for event in written) is not cached


@pytest.mark.slow
def test_a_profile_lies_beside_the_stages_and_is_no_part_of_the_key(finished: Outcome, tmp_path: Path) -> None:
    raw = {**RAW, "profile": True, "stages": RAW["stages"][:1]}
    profiled = run(check(raw), tmp_path / "tiny", progress=ConsoleProgress("silent"))
    (stage,) = (stage for stage in profiled.report["stages"] if stage["id"] == "finetune")
    (found,) = stage["profiles"]
    assert found["rows_per_s"] > 0
    folder = Path(open_run(profiled.folder).artifacts["finetune"].path).name
    assert (profiled.folder / "profiles" / folder / found["trace"]).is_file()
    assert open_run(finished.folder).artifacts["finetune"].key == open_run(profiled.folder).artifacts["finetune"].key
    assert "Training profiles" in (profiled.folder / "report.html").read_text()
    assert all(stage["profiles"] == [] for stage in finished.report["stages"])
    assert verify(profiled.folder, log=lambda line: None) == []


def test_report_follows_the_schema(finished: Outcome) -> None:
    report = json.loads((finished.folder / "report.json").read_text())
    assert report == json.loads(json.dumps(finished.report))
    assert (report["schema"], report["name"], report["baseline"]) == (1, "tiny", "finetune")
    assert (report["metric"]["name"], report["metric"]["higher_is_better"]) == ("accuracy", True)
    assert report["metric"]["chance"] == pytest.approx(0.1, abs=0.1)  # of ten digits
    assert [variant["id"] for variant in report["variants"]] == ["finetune", "quantize"]
    last = report["variants"][-1]
    assert last["stages"] == ["finetune", "quantize"]
    assert last["int8_share"] >= 0.85  # of one layer of which the first token alone is computed; the products of attention are float
    for hop in ("torch", "openvino"):
        cell = last["accuracy"][hop]
        assert cell["low"] <= cell["value"] <= cell["high"]
        assert cell["n"] == 360
    assert last["accuracy"]["triton"] == {"value": None, "reason": "the recipe has no triton_repo stage"}
    rows = report["variants"][0]["latency"]
    assert {(row["engine"], row["mode"], row["precision"]) for row in rows} >= {("torch", "eager", "fp32"), ("openvino", "static", "fp32")}
    assert all(row["n"] >= BLOCKS[0].least and row["p50_ms"] > 0 and row["batch"] == 1 and row["sequence"] is None for row in rows)
    assert {row["precision"] for row in last["latency"]} == {"int8"}
    assert (report["goals"], [found["goal"] for found in report["findings"]]) == ([], ["int8_faster"])
    assert {stage["id"] for stage in report["stages"]} == {step.id for step in plan_steps(check(RAW))}


def test_what_is_served_is_the_fastest_of_all_that_was_timed(finished: Outcome) -> None:
    served = finished.report["served"]
    names = ("variant", "precision", "float_precision", "engine", "mode")
    timed = {
        (variant["id"], *(row[name] for name in names[1:])): row
        for variant in finished.report["variants"]
        for row in variant["latency"]
        if row["engine"] == "openvino"
    }
    ranked = {tuple(one[name] for name in names): one for one in served["ranking"]}
    assert ranked.keys() == timed.keys()
    assert {key[:2] for key in ranked} >= {("finetune", "fp32"), ("quantize", "int8")}
    for key, one in ranked.items():
        assert (one["time_ms"], one["missed"]) == (pytest.approx(timed[key]["p50_ms"], abs=1e-3), [])
    key = tuple(served[name] for name in names)
    assert key == next(iter(ranked))
    least = min(row["p50_ms"] for row in timed.values())
    assert timed[key]["p50_ms"] <= max((1 + FAR) * least, least + NEGLIGIBLE_MS) + 1e-3
    assert served["accuracy"]["openvino"]["value"] == ranked[key]["metric"]
    assert served["reason"].endswith(f"of {len(ranked)} configurations")  # and there are no goals
    assert served["reason"] in (finished.folder / "report.html").read_text()


def test_the_first_engine_is_served_where_that_is_asked_for(copy: Path) -> None:
    again = run(check({**RAW, "target": {**RAW["target"], "serve": "first"}}), copy, progress=ConsoleProgress("quiet"))
    assert all(stage["cached"] for stage in again.report["stages"])  # what is served is chosen after all that it depends on
    served = again.report["served"]
    assert (served["variant"], served["precision"], served["engine"], served["ranking"]) == ("quantize", "int8", "openvino", [])
    assert served["reason"] == "target.serve: first"


def test_page_and_golden_rows_are_written(finished: Outcome) -> None:
    page = (finished.folder / "report.html").read_text()
    assert "tiny" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert (finished.folder / "golden.safetensors").stat().st_size > 0
    assert (finished.folder / "flips.jsonl").exists()


def test_second_run_does_no_work_and_says_the_same(recipe: Recipe, copy: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (copy / "stages").iterdir()}
    again = run(recipe, copy, progress=ConsoleProgress("quiet"))
    assert {path.name: path.stat().st_mtime_ns for path in (copy / "stages").iterdir()} == before
    assert all(stage["cached"] for stage in again.report["stages"])
    assert sum("cached in" in line for line in lines_of(copy)) == 7


def test_name_goals_and_order_of_keys_do_not_touch_the_cache(finished: Outcome, copy: Path, tmp_path: Path) -> None:
    other = check({**RAW, "name": "renamed", "goals": {"max_drop": 0.5}})
    again = run(other, copy, progress=ConsoleProgress("quiet"))
    assert all(stage["cached"] for stage in again.report["stages"])
    assert {goal["goal"] for goal in again.report["goals"]} == {"max_drop"}
    out, contents = compare([finished.folder, copy], tmp_path / "compared")
    assert [setting.path for setting in contents.recipe] == ["name", "goals.max_drop"]
    assert contents.machine == ()
    served = next(pair for pair in contents.pairs if pair.kind == "served")
    assert (served.reason, served.difference, served.changed, served.n) == (None, 0.0, 0, 360)
    assert (out / "compare.html").is_file()


def test_flipped_byte_is_named_by_verify_and_made_again_by_run(recipe: Recipe, copy: Path) -> None:
    [victim] = copy.glob("stages/evaluate-quantize-*/torch.safetensors")
    original = victim.read_bytes()
    damaged = bytearray(original)
    damaged[-1] ^= 1
    victim.write_bytes(bytes(damaged))
    [problem] = verify(copy, log=lambda line: None)
    assert problem.key == str(victim)
    progress = ConsoleProgress("quiet")
    again = run(recipe, copy, progress=progress)
    assert victim.read_bytes() == original
    assert {stage["id"]: stage["cached"] for stage in again.report["stages"]}["evaluate-quantize"] is False
    assert any("damaged" in warning for warning in progress.warnings)


@pytest.mark.usefixtures("no_processes")
def test_verify_reloads_the_engines(finished: Outcome) -> None:
    told: list[str] = []
    assert verify(finished.folder, log=told.append) == []
    assert any(line.startswith("quantize.openvino: 64 golden rows, 0 flips") for line in told)


def test_clean_removes_what_the_last_recipe_does_not_reference(copy: Path) -> None:
    left_over = copy / "stages" / "quantize-00000000"
    left_over.mkdir()
    builds = sorted((copy / "stages").glob("build-*"))
    assert builds  # what the next export would take; the export itself keeps its files
    assert clean(copy) == [*builds, left_over]
    assert not left_over.exists()
    assert len(open_run(copy).artifacts) == 7


def test_half_written_folders_are_swept_and_never_read(recipe: Recipe, copy: Path) -> None:
    leftover = copy / "stages" / ".quantize-12345678.abcdef01.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    run(recipe, copy, progress=ConsoleProgress("quiet"))
    assert not leftover.exists()


def test_plan_equals_the_run(recipe: Recipe, finished: Outcome) -> None:
    told = describe(recipe, finished.folder)
    assert "cached" in told
    planned = {
        entry.step.id: entry for entry in steps_of(recipe, Path("absent"), prepare(recipe, Path("absent"), ConsoleProgress("quiet")))
    }
    for variant in finished.report["variants"]:
        size = planned[variant["id"]].size
        assert size is not None
        assert (size.parameters, size.macs) == (variant["parameters"], variant["macs"])
    made = open_run(finished.folder).artifacts
    assert all(entry.cached is None for entry in planned.values())
    predicted = sum(entry.disk_bytes for entry in planned.values())
    assert predicted == pytest.approx(sum(found.size_bytes for found in made.values()), rel=0.5)  # a tiny model is mostly graph


def test_a_copy_without_hidden_files_goes_on(recipe: Recipe, copy: Path) -> None:
    hidden = sorted(copy.rglob(".*"), reverse=True)
    assert hidden
    for path in hidden:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = run(recipe, copy, progress=ConsoleProgress("quiet"))
    assert all(stage["cached"] for stage in again.report["stages"])


def test_second_writer_gets_one_clear_line(recipe: Recipe, copy: Path) -> None:
    with locked(copy), pytest.raises(InputError, match="is writing to it") as caught:
        run(recipe, copy, progress=ConsoleProgress("quiet"))
    assert len(caught.value.lines) == 1


def test_foreign_folder_is_never_written_to(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="not a run folder"):
        run(recipe, tmp_path, progress=ConsoleProgress("quiet"))
    with pytest.raises(InputError, match="a file"):
        run(recipe, tmp_path / "thesis.tex", progress=ConsoleProgress("quiet"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_unknown_start_names_the_steps(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'quantize'"):
        run(recipe, tmp_path / "x", start="quantise", progress=ConsoleProgress("quiet"))


@pytest.mark.usefixtures("no_processes")
def test_an_export_that_took_builds_is_no_measure_for_one_that_makes_all(
    recipe: Recipe, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("compress.forecast.speed", lambda threads: Speed(1e10, 1e10, 0.02, 1e9))
    shutil.rmtree(next(copy.glob("stages/export-*")))
    again = run(recipe, copy, progress=ConsoleProgress("quiet"))
    assert {stage["id"]: stage["cached"] for stage in again.report["stages"]}["export"] is False
    assert open_run(copy).artifacts["export"].metrics["reused"] == ["finetune-fp32"]
    [entry] = [line for line in map(json.loads, history_file().read_text().splitlines()) if line["stage"] == "export"]
    assert entry["reused"] is True
    entry["seconds"] = 500.0
    history_file().write_text(json.dumps(entry) + "\n")
    context = prepare(recipe, copy, ConsoleProgress("quiet"))
    shutil.rmtree(next(copy.glob("stages/export-*")))
    [found], [first] = ([one for one in steps_of(recipe, folder, context) if one.step.id == "export"] for folder in (copy, Path("absent")))
    assert found.seconds is not None
    assert first.seconds is not None
    assert found.seconds > 2 * first.seconds  # the record counts, in part
    history_file().unlink()
    [unknown] = [one for one in steps_of(recipe, Path("absent"), context) if one.step.id == "export"]
    assert first.seconds == unknown.seconds


@pytest.mark.usefixtures("no_processes")
def test_a_run_from_export_on_makes_float_builds_again(recipe: Recipe, copy: Path) -> None:
    before = {folder: folder.stat().st_ino for folder in (copy / "stages").glob("build-*")}
    run(recipe, copy, start="export", progress=ConsoleProgress("quiet"))
    assert before
    assert all(folder.stat().st_ino != number for folder, number in before.items())


def test_failing_stage_leaves_finished_ones_and_no_trace(recipe: Recipe, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, **fields: Any) -> None:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(artifact, "seal", fail)
    with pytest.raises(OSError, match="No space left"):
        run(recipe, copy, start="evaluate-quantize", progress=ConsoleProgress("quiet"))
    assert not list(copy.glob("stages/.*.tmp"))
    assert len([folder for folder in copy.glob("stages/*-*") if not folder.name.startswith("build-")]) == 7
