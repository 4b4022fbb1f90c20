"""Whole runs with a cascade: the certificate in the run, in the report and in `verify`, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.commands.plan import describe
from compress.commands.verify import verify
from compress.pipeline import run
from compress.recipe import Recipe, check
from compress.run.prepare import prepare
from export.cascade.recheck import differences
from export.cascade.stored import load, save
from export.cascade.tested import Answers
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.cascade import FILE, Cascade
from foundation.artifacts.document import read
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from foundation.standalone.confidence import confidence, route
from tests import tiny_embedding, without_clocks
from tests.export import sentiment
from tests.once import made_once
from tests.problems import raises_problem
from tests.report_keys import undocumented

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

TASK = "text-classification"
CERTIFY = {"files": [{"file": "certify.tsv", "columns": {"label": "label"}}], "shared": "drop"}
CASCADE = {"max_disagreement": 0.1, "confidence": 0.9}
QUIET = ConsoleProgress("quiet")


def recipe(folder: Path, cascade: dict[str, Any] | None = None, certify: dict[str, Any] | None = None, **more: Any) -> Recipe:
    """Writes rows, and returns a recipe of a tiny classifier with a cascade of its int8 and float models."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    texts = iter(dict.fromkeys(sentiment.rows(1000)))
    for split, count in {"train": 120, "test": 60, "certify": 200}.items():
        rows = [f"{text}\t{('negative', 'positive')[row % 2]}\n" for row, text in zip(range(count), texts, strict=False)]
        (data / f"{split}.tsv").write_text("text\tlabel\n" + "".join(rows))
    given = {
        "name": "tiny",
        "model": {"path": str(sentiment.checkpoint(1)), "task": TASK, "head": "keep"},
        "data": {"path": str(data), "max_length": 16, "files": {"train": "train.tsv", "test": "test.tsv"}, "certify": certify or CERTIFY},
        "target": {"engines": ["onnxruntime"], "batch_sizes": [1, 4], "sequence_lengths": [8, 16], "threads": 1},
        "goals": {"max_disagreement": 0.1},
        "stages": [{"quantize": {"mode": "ptq", "calibration": {"rows": 64}}}, {"export": {}}, {"cascade": cascade or CASCADE}],
    }
    return check({**given, **more})


def whole(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foundation.measure.latency.measure", without_clocks.falling)
        return run(recipe(folder), folder / "run", progress=QUIET).folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, engines_inside: None) -> Path:
    made: Path = made_once(tmp_path_factory, "cascade run", whole)
    return made


@pytest.fixture
def made(finished: Path, tmp_path: Path) -> Path:
    """A copy of the folder of the cascade."""
    artifact = open_run(finished).of_kind("cascade")
    assert artifact is not None
    return Path(shutil.copytree(artifact.path, tmp_path / "cascade"))


def found_in(folder: Path, finished: Path, **changed: Artifact) -> str:
    """Returns what is wrong with the cascade of a folder in the run."""
    known = open_run(finished)
    exported = known.of_kind("engine")
    assert exported is not None
    return "\n".join(map(str, differences(folder, {**known.variants, **changed}, known.baseline, exported)))


def test_the_certificate_says_what_the_stored_predictions_say(finished: Path, made: Path) -> None:
    found = read(Cascade, made / FILE)
    answers, keys = load(made / found.certificate.predictions, TASK)
    assert [tier.variant for tier in found.tiers] == ["quantize", "baseline"]
    assert len(keys) == found.certificate.n == 200
    score = found.tiers[0].score
    assert score is not None
    answering = route([confidence(answers.tiers[0], score.score)], [found.tiers[0].threshold])
    given = np.where(answering == 0, answers.tiers[0].argmax(1), answers.tiers[1].argmax(1))
    assert int((given != answers.original.argmax(1)).sum()) == found.certificate.disagreements
    assert found.rows_per_tier == (int((answering == 0).sum()), int((answering == 1).sum()))
    assert found.escalation[0].units == found.rows_per_tier[1]
    assert found.times is not None
    assert found.times.rows == 60
    assert found.tiers[0].cost_ms < found.tiers[1].cost_ms
    assert found_in(made, finished) == ""


def test_thresholds_at_their_end_answer_as_the_original_engine_does(finished: Path, made: Path) -> None:
    """The stored answers of the last tier are bit-equal to those of its engine in equal batches."""
    from export.engines.spec import spec_of
    from foundation.artifacts.exported import Exported
    from foundation.core.target import Target
    from foundation.measure.engine_process import EngineProcess

    known, found = open_run(finished), read(Cascade, made / FILE)
    exported = known.of_kind("engine")
    assert exported is not None
    answers, _ = load(made / found.certificate.predictions, TASK)
    builds = read(Exported, exported.path / "export.json").builds
    build, engine = next((build, one) for build in builds for one in build.engines if build.key(one) == found.tiers[-1].key)
    selection, _ = load(made / found.certificate.path.predictions, TASK)
    data = prepare(check(dict(known.recipe)), finished, QUIET).data
    assert data.certify is not None
    spec = spec_of(exported.path, build, engine, Target.model_validate(known.recipe["target"]))
    with EngineProcess(spec) as process:
        again = process.predict([*data.selection.rows, *data.certify.rows], spec.evaluation_batch)
    np.testing.assert_array_equal(again, np.concatenate([selection.tiers[-1], answers.tiers[-1]]))
    assert found.certificate.path.points[0].thresholds == (None,)
    assert found.certificate.path.points[0].disagreements == found.tiers[-1].disagreements_alone
    assert len(selection.original) == found.certificate.path.selection_rows


def test_the_report_has_the_certificate_and_judges_the_goal(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    assert undocumented(report) == []
    certificate = report["cascade"]["certificate"]
    assert (certificate["bound"], certificate["confidence"], certificate["n"]) == (0.1, 0.9, 200)
    (goal,) = [goal for goal in report["goals"] if goal["goal"] == "max_disagreement"]
    assert goal["met"] is True
    assert goal["value"] == 0.1
    page = (finished / "report.html").read_text()
    assert "With confidence 90" in page
    assert f"{certificate['disagreements']} of 200 certificate rows" in page
    assert "other answers, %" in page


def test_verify_follows_the_certificate_again(finished: Path) -> None:
    lines: list[str] = []
    assert verify(finished, log=lines.append) == []
    assert any("cascade: at most 0.1" in line for line in lines)


def changed_threshold(made: Path) -> None:
    found = read(Cascade, made / FILE)
    tiers = (found.tiers[0].with_(threshold=0.0), *found.tiers[1:])
    (made / FILE).write_text(json.dumps(found.with_(tiers=tiers).written()))


def changed_order(made: Path) -> None:
    found = read(Cascade, made / FILE)
    (made / FILE).write_text(json.dumps(found.with_(tiers=found.tiers[::-1]).written()))


def changed_count(made: Path) -> None:
    found = read(Cascade, made / FILE)
    (made / FILE).write_text(json.dumps(found.with_(certificate=found.certificate.with_(disagreements=0, p_value=0.0)).written()))


def changed_answers(made: Path) -> None:
    answers, keys = load(made / "certify.safetensors", TASK)
    other = answers.original.copy()
    other[:60] = other[:60, ::-1]
    save(made / "certify.safetensors", replace(answers, original=other), [row.tobytes() for row in keys])


def leaked_rows(made: Path) -> None:
    answers, keys = load(made / "certify.safetensors", TASK)
    _, known = load(made / "selection.safetensors", TASK)
    save(made / "certify.safetensors", answers, [row.tobytes() for row in (*known[:1], *keys[1:])])


def fewer_tiers(made: Path) -> None:
    answers, keys = load(made / "certify.safetensors", TASK)
    save(made / "certify.safetensors", Answers(TASK, answers.original, answers.tiers[1:]), [row.tobytes() for row in keys])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (changed_threshold, "thresholds of the tiers"),
        (changed_order, "last tier is not baseline"),
        (changed_count, "figures of the certificate"),
        (changed_answers, "of the path"),
        (leaked_rows, "selection rows too"),
        (fewer_tiers, "predictions of 1"),
    ],
)
def test_what_does_not_follow_is_found(change: Callable[[Path], None], part: str, finished: Path, made: Path) -> None:
    change(made)
    assert part in found_in(made, finished)


@pytest.mark.parametrize("variant", ["quantize", "baseline"])
def test_a_swapped_checkpoint_is_found(variant: str, finished: Path, made: Path) -> None:
    other = Artifact(made, {"digest": "other", "id": variant})
    assert variant in found_in(made, finished, **{variant: other})


def test_a_plan_predicts_the_mean_time(tmp_path: Path) -> None:
    text = describe(recipe(tmp_path), tmp_path / "run")
    (line,) = [line for line in text.splitlines() if line.startswith("cascade:")]
    quantized, original = (float(found) for found in re.findall(r"\(([\d.]+) ms\)", line))
    mean = float(re.findall(r"about ([\d.]+) ms", line)[0])
    assert mean == pytest.approx(quantized + 0.15 * original, rel=0.1)
    assert "15 %" in line or "15%" in line


def test_a_plan_takes_the_shares_of_an_earlier_run(made: Path, tmp_path: Path) -> None:
    """Its path answers another bound, too: a bound that nothing passes lets every row go on."""
    shutil.copytree(made, tmp_path / "run" / "stages" / "cascade-earlier")
    known = read(Cascade, made / FILE)
    chosen = known.certificate.path.points[known.certificate.path.chosen].escalated[0] / known.certificate.n
    for cascade, share in ((CASCADE, chosen), ({**CASCADE, "max_disagreement": 0.0135, "confidence": 0.9}, None)):
        (line,) = [line for line in describe(recipe(tmp_path, cascade), tmp_path / "run").splitlines() if line.startswith("cascade:")]
        quantized, original = (float(found) for found in re.findall(r"\(([\d.]+) ms\)", line))
        found = float(re.findall(r"([\d.]+)% go on", line)[0]) / 100
        assert found == pytest.approx(chosen, abs=0.006) if share is not None else found > chosen
        assert float(re.findall(r"about ([\d.]+) ms", line)[0]) == pytest.approx(quantized + found * original, rel=0.1)
        assert "earlier run" in line


def test_rows_of_training_are_refused(tmp_path: Path) -> None:
    leak = {"files": ["certify.tsv", "train.tsv"]}
    with raises_problem("data.certify.files", "120 of 320 rows", "drop"):
        run(recipe(tmp_path, certify=leak), tmp_path / "run", progress=QUIET)


def test_too_few_rows_say_how_many_are_needed(tmp_path: Path) -> None:
    with raises_problem("data.certify.files", "200 rows", "0.01", "299", "more rows"):
        run(recipe(tmp_path, {"max_disagreement": 0.01}), tmp_path / "run", progress=QUIET)


def test_a_bound_on_the_drop_needs_labels(tmp_path: Path) -> None:
    unlabelled = {"files": "certify.tsv", "shared": "drop"}
    with raises_problem("cascade.max_drop", "labels"):
        run(recipe(tmp_path, {**CASCADE, "max_drop": 0.1}, unlabelled), tmp_path / "run", progress=QUIET)


def test_recipes_that_make_no_cascade_are_refused(tmp_path: Path) -> None:
    with raises_problem("stages.cascade.tiers", "quantize", "original", "baseline"):
        recipe(tmp_path, {**CASCADE, "tiers": ["baseline", "quantize"]})
    with raises_problem("stages.cascade.tiers", "quantise", "quantize"):
        recipe(tmp_path, {**CASCADE, "tiers": ["quantise", "baseline"]})
    with raises_problem("stages.cascade.tiers", "baseline, baseline", "one tier"):
        recipe(tmp_path, {**CASCADE, "tiers": ["baseline", "baseline"]})
    with raises_problem("data.certify", "cascade", "rows of its own"):
        recipe(tmp_path, data={"path": str(tmp_path / "data")})
    with raises_problem("stages", "cascade given without export"):
        recipe(tmp_path, stages=[{"quantize": {}}, {"cascade": CASCADE}])


def test_tiers_in_the_wrong_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where int8 takes longer than the original it may not stand before it."""
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    named = {**CASCADE, "tiers": ["quantize", "baseline"]}
    with raises_problem("stages.cascade.tiers", "quantize", "baseline", "rising order of cost"):
        run(recipe(tmp_path, named), tmp_path / "run", progress=QUIET)


def of_vectors(folder: Path, cascade: dict[str, Any]) -> Recipe:
    """Returns a recipe of a tiny model of sentence vectors, with a cascade of its int8 and float models."""
    model, data = tiny_embedding.folder(folder / "source"), tiny_embedding.pairs(folder / "data")
    lines = [f"{text}\n" for text in dict.fromkeys(sentiment.rows(2000)[1000:])]
    (data / "certify.csv").write_text("line\n" + "".join(lines[:150]))
    given = tiny_embedding.recipe("tiny", model, data)
    given["data"] = {**given["data"], "certify": {"files": [{"file": "certify.csv", "columns": {"text": "line"}}], "shared": "drop"}}
    target = {"engines": ["onnxruntime"], "batch_sizes": [1], "sequence_lengths": [8, 16], "threads": 1}
    stages = [{"quantize": {"calibration": {"rows": 64}}}, {"export": {}}, {"cascade": cascade}, {"triton_repo": {"serve": False}}]
    return check({**given, "target": target, "stages": stages})


@pytest.mark.slow
def test_vectors_are_certified_by_their_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is what the stored vectors say, the report names the distance, and another distance does not follow from them."""
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.falling)
    wanted = {"max_disagreement": 0.3, "confidence": 0.9, "max_distance": 0.02}
    folder = run(of_vectors(tmp_path, wanted), tmp_path / "run", progress=QUIET).folder
    artifact = open_run(folder).of_kind("cascade")
    assert artifact is not None
    found = read(Cascade, artifact.path / FILE)
    answers, _ = load(artifact.path / found.certificate.predictions, "sentence-embedding")
    score, threshold = found.tiers[0].score, found.tiers[0].threshold
    assert score is not None
    assert score.form == "vector"
    first, last, original = (one.astype(np.float64) for one in (*answers.tiers, answers.original))
    size = np.sqrt((first**2).sum(axis=1, keepdims=True))
    sure = np.concatenate([first / size, np.log(size)], axis=1) @ np.array(score.weights, float) + float(score.bias[0])
    keeps = np.zeros(len(sure), bool) if threshold is None else sure >= threshold
    given = np.where(keeps[:, np.newaxis], first, last)
    apart = np.sqrt(((given - original) ** 2).sum(axis=1)) / np.sqrt((original**2).sum(axis=1))
    assert int((apart > 0.02).sum()) == found.certificate.disagreements
    assert found.certificate.distance == 0.02
    assert "farther than 0.02 from those" in (folder / "report.html").read_text()
    assert verify(folder, log=lambda line: None) == []
    copy = Path(shutil.copytree(artifact.path, tmp_path / "cascade"))
    for distance in (0.0001, 10.0, None):
        changed = found.with_(certificate=found.certificate.with_(max_distance=distance))
        (copy / FILE).write_text(json.dumps(changed.written()))
        if distance is not None:
            assert "disagreements and p" in found_in(copy, folder)
    made = open_run(folder).of_kind("model_repository")
    assert made is not None
    served = json.loads((made.path / "model_repository" / "cascade" / "1" / "cascade.json").read_text())
    assert (served["watch"]["form"], served["watch"]["limit"]) == ("vector", 0.02)


def test_a_distance_is_needed_for_numbers_and_vectors_alone(tmp_path: Path) -> None:
    wanted = {"max_disagreement": 0.3, "confidence": 0.9}
    with raises_problem("stages.cascade.max_distance", "missing", "sentence-embedding", "difference"):
        run(of_vectors(tmp_path, wanted), tmp_path / "run", progress=QUIET)
    (other := tmp_path / "other").mkdir()
    with raises_problem("stages.cascade.score", "margin", "calibrated"):
        run(of_vectors(other, {**wanted, "max_distance": 0.1, "score": "margin"}), tmp_path / "run", progress=QUIET)
    (classes := tmp_path / "classes").mkdir()
    with raises_problem("stages.cascade.max_distance", "text-classification", "text-regression", "leave it out"):
        run(recipe(classes, {**CASCADE, "max_distance": 0.1}), classes / "run", progress=QUIET)
