"""A cascade in the real server, with its environment: python -m pytest -m slow tests/triton_repo/cascade/test_served.py"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from compress.commands.rollout import answer, rollout
from compress.commands.verify import verify
from compress.pipeline import run
from foundation.artifacts.document import read
from foundation.artifacts.run_folder import open_run
from foundation.artifacts.triton import Results
from foundation.core.progress import ConsoleProgress
from foundation.labels.tags import Tags
from foundation.labels.value import Numbers
from foundation.labels.vectors import Pairs
from tests import without_clocks
from tests.export import sentiment
from tests.test_cascade import CASCADE, recipe
from tests.told import Told
from tests.triton_repo import tiny_exports as tiny
from tests.triton_repo.cascade import tiny_cascades
from tests.triton_repo.test_triton_repo import context
from triton_repo import client, environment, layout
from triton_repo.cascade.layout import NAME, write_cascade
from triton_repo.cascade.served.metrics import FAMILIES, PREFIX
from triton_repo.cascade.settings import Audit
from triton_repo.cascade.stage import compare
from triton_repo.config import Scheduling
from triton_repo.control import Control
from triton_repo.deployment import models_in, repository_of
from triton_repo.load.connection import Address
from triton_repo.load.load import examine, load_test
from triton_repo.load.settings import Load
from triton_repo.probe import prepared_of
from triton_repo.served_models import ServedModel, divided
from triton_repo.service import Service
from triton_repo.serving import server_of
from triton_repo.triton_repo import TritonRepo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = tiny_cascades.texts(60)
CAREFUL, EAGER = "careful", "eager"
"""The cascades at both ends of the threshold."""
LOWEST = -3.4028234663852886e38


@pytest.fixture(scope="module")
def threshold() -> float:
    return tiny_cascades.middle(ROWS)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, threshold: float) -> Iterator[Service]:
    """The models of both tiers, the cascade, and the cascade at both ends."""
    root = tmp_path_factory.mktemp("cascades")
    exported = tiny_cascades.export(root / "export", ROWS)
    layout.write_repository(root / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1, 4))
    about = {"pairs": False, "batch_sizes": (1, 4), "max_batch_size": 8, "scheduling": Scheduling()}
    for name, value, audit in ((CAREFUL, None, 0.0), (EAGER, LOWEST, 1.0), (NAME, threshold, 0.1)):
        document = tiny_cascades.document([value], upper=0.99 if name == NAME else 0.3)
        cascade = tiny_cascades.cascade_of(exported, document)
        write_cascade(root / "repository", cascade, Audit(share=audit), **about)
        if name != NAME:
            (root / "repository" / NAME).rename(root / "repository" / name)
    for name in (CAREFUL, EAGER):
        place = root / "repository" / name / "config.pbtxt"
        place.write_text(place.read_text().replace(f'name: "{NAME}"', f'name: "{name}"', 1))
    with Service(root / "repository", environment.check(), root / "log") as started:
        yield started


def metrics(running: Service) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{running.metrics_address}/metrics", timeout=10) as answer:
        lines = re.findall(rf"^({PREFIX}\w+)\{{([^}}]*)\}} (\S+)$", answer.read().decode(), re.M)
    found = {}
    for name, labels, value in lines:
        known = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert (known.pop("version"), known.pop("instance")) == ("1", "0")
        found[",".join([name.removeprefix(PREFIX), *(known[key] for key in sorted(known))])] = float(value)
    return found


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_each_row_has_the_answer_of_its_tier_and_the_metrics_say_which(running, threshold):
    before = metrics(running)
    answers = client.evaluate(running.grpc_address, NAME, ROWS, 4)
    logits, tiers = tiny_cascades.answered(ROWS, [threshold])
    assert answers.tiers is not None
    assert answers.tiers.tolist() == tiers.tolist()
    np.testing.assert_array_equal(answers.logits, logits.astype(np.float32))
    assert answers.contradiction(tiny.text_preprocessor()) is None
    counts = {f"rows_total,{NAME},{tier}": int((tiers == tier).sum()) for tier in (1, 2)}
    until(lambda: all(metrics(running)[key] - before[key] == count for key, count in counts.items()))
    found = metrics(running)
    assert {key.partition(",")[0] for key in found} == set(FAMILIES)
    assert found[f"alarm,{NAME},escalation_1"] == 0


@pytest.mark.parametrize(("cascade", "model"), [(CAREFUL, "baseline-fp32"), (EAGER, "quantize-int8")])
def test_at_the_ends_of_the_threshold_it_is_one_model_bit_by_bit_at_equal_batches(running, cascade, model):
    with InferenceServerClient(running.grpc_address) as asked:
        for size in (1, 3, 8):
            for start in range(0, len(ROWS) - size + 1, size):
                both = [client.Answers.of([client.infer_rows(asked, name, ROWS[start : start + size])]) for name in (cascade, model)]
                np.testing.assert_array_equal(both[0].logits, both[1].logits)
                for name, values in both[1].outputs.items():
                    np.testing.assert_array_equal(both[0].outputs[name], values)


def test_a_shift_rings_and_confident_drift_is_found_by_the_audit(running):
    """The careful cascade escalates every row, though 30 % were certified; the eager one none, and answers otherwise than its last tier."""
    for name, test in ((CAREFUL, "escalation_1"), (EAGER, "disagreement")):
        client.evaluate(running.grpc_address, name, ROWS, 4)
        until(lambda name=name, test=test: metrics(running)[f"alarm,{name},{test}"] == 1)
    found = metrics(running)
    assert found[f"alarm,{EAGER},escalation_1"] == 0, "escalation alone shows nothing"
    assert found[f"audit_disagreements_total,{EAGER}"] > 0
    log = running.log.read_text()
    assert f"compress: cascade {CAREFUL}: escalation_1 is above 0.3" in log
    assert f"compress: cascade {EAGER}: disagreement is above 0.01" in log


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_load_test_reports_rows_by_tier(running, threshold, protocol):
    server = Address(protocol, running.grpc_address if protocol == "grpc" else running.http_address)
    model = examine(server, NAME)
    [one] = load_test(server, model, ROWS, [Load(concurrency=2, seconds=1.0, rows=2)])
    assert one["changed"] == 0
    assert sum(one["rows_per_tier"]) == 2 * one["answered"]
    share = (tiny_cascades.answered(ROWS, [threshold])[1] == 1).mean()
    assert one["rows_per_tier"][0] / sum(one["rows_per_tier"]) == pytest.approx(share, abs=0.1)


def test_the_stage_serves_and_compares_it(tmp_path, threshold):
    exported = tiny_cascades.export(tmp_path / "export", ROWS)
    (tmp_path / "out").mkdir()
    given = replace(context(ROWS, tmp_path), cascade=tiny_cascades.artifact(tmp_path / "cascade", [threshold]))
    TritonRepo(concurrency=(1,)).run(exported, replace(given, progress=Told()), tmp_path / "out")
    found = read(Results, tmp_path / "out" / "triton.json").cascade
    tiers = tiny_cascades.answered(ROWS, [threshold])[1]
    assert found is not None
    assert found.rows_per_tier == (int((tiers == 1).sum()), int((tiers == 2).sum()))
    assert (found.disagreements, found.max_abs, found.routed_otherwise, found.n) == (0, 0.0, 0, len(ROWS))
    assert found.latency[0].p50_ms > 0
    assert (tmp_path / "out" / str(found.predictions)).exists()


def test_it_is_served_under_the_name_of_the_run_and_comes_back(running, tmp_path, threshold):
    cascade = tiny_cascades.cascade(tmp_path / "export", ROWS, [threshold])
    about = {"pairs": False, "batch_sizes": (1, 4), "max_batch_size": 8, "scheduling": Scheduling(instances=2)}
    write_cascade(tmp_path / "repository", cascade, Audit(), **about)
    models = [ServedModel("mine", NAME, NAME, "")]
    for _ in range(2):  # the second start reads the networks of the first
        with Service(tmp_path / "repository", environment.check(), tmp_path / "log", models=models) as started:
            answers = client.evaluate(started.grpc_address, "mine", ROWS, 4)
            np.testing.assert_array_equal(answers.logits, tiny_cascades.answered(ROWS, [threshold])[0].astype(np.float32))


@pytest.mark.parametrize(("form", "threshold", "distance"), [("tags", 0.1, None), ("value", 0.5, 1.0), ("vector", 0.1, 1.0)])
def test_tags_numbers_and_vectors_are_served_as_they_were_certified(tmp_path, form, threshold, distance):
    made = tiny_cascades.prepared(form)
    exported = tiny_cascades.export(tmp_path / "export", ROWS, preprocessor=made)
    document = tiny_cascades.document([threshold], score=tiny_cascades.score_of(form), distance=distance)
    cascade = tiny_cascades.cascade_of(exported, document)
    about = {"pairs": False, "batch_sizes": (1, 4), "max_batch_size": 8, "scheduling": Scheduling()}
    write_cascade(tmp_path / "repository", cascade, Audit(share=1.0), **about)
    with Service(tmp_path / "repository", environment.check(), tmp_path / "log") as started:
        answers = client.evaluate(started.grpc_address, NAME, ROWS, 4)
        with InferenceServerClient(started.grpc_address) as asked:
            together = client.Answers.of([client.infer_rows(asked, NAME, ROWS[:8])])
        until(lambda: metrics(started)[f"audited_rows_total,{NAME}"] == len(ROWS) + 8)
        seen = metrics(started)
    labels = {"tags": Tags(np.zeros((len(ROWS), 3, 2), np.int32)), "value": Numbers(np.ones(len(ROWS), np.float32))}
    found = compare(cascade, made.task, answers, labels.get(form, Pairs(np.zeros((len(ROWS), 2), np.float32))))
    assert (found.disagreements, found.routed_otherwise) == (0, 0)
    assert min(found.rows_per_tier) > 0
    assert seen[f"audit_disagreements_total,{NAME}"] > 0
    assert seen[f"rows_total,{NAME},1"] == found.rows_per_tier[0] + int((together.tiers == 1).sum())
    assert together.tiers.tolist() == answers.tiers[:8].tolist()
    np.testing.assert_allclose(together.logits, answers.logits[:8, : together.logits.shape[1]], atol=1e-6)


def test_a_run_with_a_cascade_is_served_under_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.falling)
    stages = [{"quantize": {"mode": "ptq", "calibration": {"rows": 64}}}, {"export": {}}, {"cascade": CASCADE}]
    given = recipe(tmp_path, stages=[*stages, {"triton_repo": {"concurrency": [1], "audit": {"share": 0.5}}}])
    folder = run(given, tmp_path / "run", progress=ConsoleProgress("quiet")).folder
    made = open_run(folder).of_kind("model_repository")
    assert made is not None
    found = read(Results, made.path / "triton.json").cascade
    assert found is not None
    assert (sum(found.rows_per_tier), found.disagreements, found.routed_otherwise) == (60, 0, 0)
    models, others = divided(models_in(folder), everything=False)
    assert [(model.name, model.folder) for model in models] == [("tiny", NAME)]
    assert {model.folder for model in others} == {"baseline-fp32", "quantize-int8"}
    said: list[str] = []
    service = server_of(repository_of(folder), tmp_path / "log", models=models)
    with Control(folder, lambda request, say: answer(service, models, request, say)), service as served:
        rows = list(sentiment.rows(20))
        answers = client.evaluate(served.grpc_address, "tiny", rows, 4)
        done = rollout(folder, folder, log=said.append)  # to the same run: versions differ, answers do not
        again = client.evaluate(served.grpc_address, "tiny", rows, 4)
        assert verify(folder, live=True, url=served.grpc_address, log=said.append) == []
    assert [(one["model"], one["after"]) for one in done["models"]] == [("tiny", "2")]
    assert len([line for line in said if line.startswith("cascade.triton") and "60 golden rows, 0 flips" in line]) == 2
    np.testing.assert_array_equal(again.logits, answers.logits)
    assert answers.contradiction(prepared_of(repository_of(folder) / NAME)) is None
    assert answers.tiers is not None
    assert set(answers.tiers) <= {1, 2}
