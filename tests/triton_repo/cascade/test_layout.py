"""The files of a cascade in the repository, and the stage that writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from foundation.artifacts.document import read
from foundation.artifacts.triton import CascadeModel, Results
from foundation.core.progress import ConsoleProgress
from foundation.labels.classes import ClassIds
from foundation.standalone import confidence, e_process
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import RESPONSES
from tests.problems import raises_problem
from tests.test_cascade import recipe
from tests.triton_repo import tiny_exports as tiny
from tests.triton_repo.cascade import tiny_cascades
from tests.triton_repo.test_served_models import entry, repository
from tests.triton_repo.test_triton_repo import context
from tests.triton_repo.test_tuned import TUNE
from triton_repo import served_models
from triton_repo.blobs import BlobCache
from triton_repo.cascade import served
from triton_repo.cascade.layout import FILES, NAME, cascade_of, write_cascade
from triton_repo.cascade.settings import Audit
from triton_repo.cascade.stage import CascadeInRepository, compare, routed
from triton_repo.client import Answers, ServedWrong
from triton_repo.config import Scheduling, from_text
from triton_repo.live import KEPT, LiveRepository
from triton_repo.queueing import Queue, read_policy
from triton_repo.triton_repo import TritonRepo
from triton_repo.tuning.load import Level, Loaded

pytestmark = pytest.mark.whole

ROWS = tiny_cascades.texts(40)
VARIANTS = ("small", "quantize", "baseline")


def written(root: Path, thresholds=(1.5, None), variants=VARIANTS, **changes) -> Path:
    cascade = tiny_cascades.cascade(root / "export", ROWS, thresholds, variants, upper=0.3)
    scheduling = Scheduling(2, 500, Queue(max_requests=9), 3)
    about = {"pairs": False, "batch_sizes": (1, 4), "max_batch_size": 8, "scheduling": scheduling} | changes
    write_cascade(root / "repository", cascade, Audit(share=0.25, false_alarm=0.02), **about)
    return root / "repository" / NAME


def test_its_folder_holds_a_whole_model_for_each_tier(tmp_path):
    folder = written(tmp_path)
    version = folder / "1"
    names = {*FILES, "confidence.py", "e_process.py", "cascade.json", "preprocess.json", "tokenizer.json", "warm_up"}
    assert {path.name for path in version.iterdir()} == {*names, "tier-1", "tier-2", "tier-3"}
    for module in (confidence, e_process):
        assert (version / Path(module.__file__).name).read_bytes() == Path(module.__file__).read_bytes()
    for name in FILES:
        assert (version / name).read_bytes() == (Path(next(iter(served.__path__))) / name).read_bytes()
    assert sorted(path.name for path in (version / "warm_up").iterdir()) == ["16.TEXT", "8.TEXT"]
    for number, variant in enumerate(VARIANTS, 1):
        tier = version / f"tier-{number}"
        source = next((tmp_path / "export").glob(f"{variant}-*")) / "openvino.bin"
        assert (tier / "openvino.bin").read_bytes() == source.read_bytes()
        assert (tier / "model.py").exists()
        assert json.loads((tier / "settings.json").read_text())["properties"]["INFERENCE_NUM_THREADS"] == "3"
    assert not any(path.is_symlink() for path in folder.rglob("*"))


def test_its_configuration_is_a_classifier_s_with_the_tier(tmp_path):
    config = from_text((written(tmp_path) / "config.pbtxt").read_text())
    assert (config.name, config.max_batch_size, config.instance_group[0].count) == (NAME, 8, 2)
    assert [one.name for one in config.input] == ["TEXT"]
    assert [one.name for one in config.output] == [*(one.name for one in RESPONSES["label"].outputs(3)), "TIER"]
    assert (config.output[-1].data_type, list(config.output[-1].dims)) == (8, [1]), "INT32"
    assert read_policy(config).max_requests == 9
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert not config.model_warmup, "warm-up requests of the server would be counted"


def test_what_the_served_model_reads(tmp_path):
    found = json.loads((written(tmp_path) / "1" / "cascade.json").read_text())
    margin = dict(tiny_cascades.MARGIN)
    assert found["tiers"] == [
        {"folder": "tier-1", "score": margin, "threshold": 1.5},
        {"folder": "tier-2", "score": margin, "threshold": None},
        {"folder": "tier-3", "score": None, "threshold": None},
    ]
    assert found["warm_up"] == ["8", "16"]
    watch = {
        "escalation": [0.3, 0.3],
        "disagreement": 0.01,
        "form": "class",
        "limit": None,
        "audit": 0.25,
        "false_alarm": 0.02,
        "instances": 2,
    }
    assert found["watch"] == watch


def test_tiers_that_cannot_be_served(tmp_path):
    exported = tiny_cascades.export(tmp_path, ROWS)
    document = tiny_cascades.document([1.0])
    first = document.tiers[0]
    for change in ({"mode": "dynamic"}, {"engine": "onnxruntime"}, {"variant": "other"}, {"precision": "fp32"}):
        wrong = document.with_(tiers=(first.with_(**change), document.tiers[1]))
        with raises_problem("cascade.tiers", "tier 1", *map(str, change.values())):
            cascade_of(exported, wrong)
    torch = first.with_(engine="torch", mode="eager")  # it runs, but not in the server
    with raises_problem("cascade.tiers", "torch", "openvino"):
        cascade_of(exported, document.with_(tiers=(torch, document.tiers[1])))
    prepared = Preprocessor.load(tmp_path / "quantize-int8")
    replace(prepared, labels=prepared.labels[::-1]).save(tmp_path / "quantize-int8")
    with raises_problem("cascade.tiers", "2 different lists of labels"):
        cascade_of(exported, document)


def test_the_copy_of_a_running_server_keeps_the_networks_of_each_tier(tmp_path):
    written(tmp_path)
    live = LiveRepository(tmp_path / "live", tmp_path / "repository", BlobCache({"openvino": "1"}, tmp_path / "blobs"))
    folders = [live.folder / NAME / "1" / f"tier-{number}" for number in (1, 2, 3)]
    kept = [Path(json.loads((folder / "machine.json").read_text())[KEPT]).resolve() for folder in folders]
    assert len(set(kept)) == 3
    assert all(path.parent == (tmp_path / "blobs").resolve() for path in kept)


def test_the_stage_writes_it_next_to_the_models(tmp_path):
    exported = tiny_cascades.export(tmp_path / "export", ROWS)
    (tmp_path / "out").mkdir()
    given = replace(context(ROWS, tmp_path), cascade=tiny_cascades.artifact(tmp_path / "cascade", [2.0], bound=0.02))
    TritonRepo(serve=False, audit=Audit(share=0.1)).run(exported, given, tmp_path / "out")
    repository = tmp_path / "out" / "model_repository"
    assert {path.name for path in repository.iterdir()} == {"README.md", "quantize-int8", "baseline-fp32", NAME}
    text = (repository / "README.md").read_text()
    assert all(part in text for part in ("`cascade` (serve this one)", "TIER", "At most 2 %", "95 %"))
    results = read(Results, tmp_path / "out" / "triton.json")
    assert results.cascade == CascadeModel(model=NAME, audited_share=0.1, false_alarm=0.01, reason="serve: false", n=0)
    found = served_models.models_of(repository, results, "run")
    assert [(model.name, model.folder, model.part) for model in found] == [
        ("run", NAME, ""),
        ("baseline-fp32", "baseline-fp32", None),
        ("quantize-int8", "quantize-int8", None),
    ]
    assert json.loads((repository / NAME / "1" / "cascade.json").read_text())["watch"]["audit"] == 0.1


def test_tags_that_are_not_those_of_the_certificate_are_refused(tmp_path):
    """Entities are put together from the tags of first tokens, whose places are those of one tokenizer."""
    exported = tiny_cascades.export(tmp_path, ROWS, preprocessor=tiny_cascades.prepared("tags"))
    document = tiny_cascades.document([2.0], score={**tiny_cascades.MARGIN, "form": "tags"})
    assert cascade_of(exported, document).form == "tags"
    for change in ({"buckets": (16,)}, {"tokenizer": other_words()}, {"max_length": 8}):
        replace(tiny_cascades.prepared("tags"), **change).save(tmp_path / "quantize-int8")
        with raises_problem("stages.cascade.tiers", "tokenizers", "lengths", "leave that tier out"):
            cascade_of(exported, document)
    for folder in ("quantize-int8", "baseline-fp32"):
        replace(tiny_cascades.prepared("tags"), response="entities-max").save(tmp_path / folder)
    with raises_problem("stages.cascade", "entities-max", "entities is allowed"):
        cascade_of(exported, document)


def other_words() -> Tokenizer:
    """A tokenizer that knows one word more."""
    made = tiny.text_preprocessor().tokenizer
    made.add_tokens(["film,"])
    return made


@pytest.mark.parametrize("run", ["run", "baseline-fp32", NAME])
def test_clients_call_it_as_the_run(run, tmp_path):
    results = Results.model_validate({"models": [entry("baseline-fp32")], "chosen": "baseline-fp32", "cascade": {"model": NAME}})
    found = served_models.models_of(repository(tmp_path, "baseline-fp32", NAME), results, run)
    assert [(model.folder, model.part) for model in found] == [(NAME, ""), ("baseline-fp32", None)]
    assert len({model.name for model in found}) == 2
    assert found[0].name == (NAME if run == "baseline-fp32" else run)


def answers_of(logits: np.ndarray, tiers: np.ndarray) -> Answers:
    outputs = RESPONSES["label"].of(logits, tiny.LABELS)
    return Answers(outputs.pop("LOGITS"), outputs, ROWS, tiers.astype(np.int32))


def test_the_server_is_held_against_the_engine_of_the_tier_that_answered(tmp_path):
    thresholds = [tiny_cascades.middle(ROWS, variant) for variant in VARIANTS[:-1]]
    cascade = tiny_cascades.cascade(tmp_path, ROWS, thresholds, VARIANTS)
    logits, tiers = tiny_cascades.answered(ROWS, thresholds, VARIANTS)
    labels = ClassIds(np.zeros(len(ROWS), np.int64))
    assert routed(cascade, tiny_cascades.logits(ROWS, VARIANTS)).tolist() == tiers.tolist()
    found = compare(cascade, "text-classification", answers_of(logits, tiers), labels)
    assert (found.disagreements, found.max_abs, found.routed_otherwise) == (0, 0.0, 0)
    assert found.rows_per_tier == tuple(int((tiers == number).sum()) for number in (1, 2, 3))
    one = int(np.flatnonzero(tiers == 1)[0])
    last = tiny_cascades.logits(ROWS, VARIANTS)[2]
    elsewhere, other = logits.copy(), tiers.copy()
    elsewhere[one], other[one] = last[one], 3  # close to the threshold, say
    assert compare(cascade, "text-classification", answers_of(elsewhere, other), labels).routed_otherwise == 1
    with pytest.raises(ServedWrong, match=f"{(tiers != 3).sum()} of {len(ROWS)} rows"):
        compare(cascade, "text-classification", answers_of(last, np.full(len(ROWS), 3)), labels)
    with pytest.raises(ServedWrong, match="differ from the evaluated engines"):
        compare(cascade, "text-classification", answers_of(last, tiers), labels)


def test_an_audit_needs_a_cascade(tmp_path):
    stages = [{"export": {}}, {"triton_repo": {"audit": {"share": 0.1}}}]
    with raises_problem("stages.triton_repo.audit", "cascade"):
        recipe(tmp_path, stages=stages)
    for share in (-0.1, 1.1):
        with raises_problem("audit.share"):
            recipe(tmp_path, stages=[{"export": {}}, {"triton_repo": {"audit": {"share": share}}}])


def test_the_cascade_is_what_is_tuned(tmp_path, monkeypatch):
    exported, seen = tiny_cascades.export(tmp_path / "export", ROWS), []

    def measured(write, model, rows, tune, scratch):
        def measure(point, seconds, limit_ms):
            folder = tmp_path / f"point-{len(seen)}"
            write(point, folder)
            seen.append((point, model, folder))
            return Loaded((Level(4, 100.0 * point.instances, 1.0, 5.0, 0),), limit_ms)

        return measure

    monkeypatch.setattr("triton_repo.tuning.tuning.measured", measured)
    monkeypatch.setattr(TritonRepo, "_results", lambda self, models, measure: Results())
    monkeypatch.setattr(CascadeInRepository, "measured", lambda self, repository, context, out, concurrency: self.entry)
    (tmp_path / "out").mkdir()
    progress = ConsoleProgress("quiet")
    given = replace(context(ROWS, tmp_path, threads=2), progress=progress, cascade=tiny_cascades.artifact(tmp_path / "cascade", [2.0]))
    TritonRepo(tune=TUNE).run(exported, given, tmp_path / "out")
    for point, model, folder in seen:
        assert (model, [path.name for path in folder.iterdir()]) == (NAME, [NAME])
        config = from_text((folder / NAME / "config.pbtxt").read_text())
        assert (config.instance_group[0].count, config.max_batch_size) == (point.instances, point.max_batch_size)
        threads = {json.loads(file.read_text())["properties"]["INFERENCE_NUM_THREADS"] for file in folder.rglob("settings.json")}
        assert threads == {str(point.threads)}
        assert json.loads((folder / NAME / "1" / "cascade.json").read_text())["watch"]["instances"] == point.instances
    results = read(Results, tmp_path / "out" / "triton.json")
    assert results.tuned is not None
    assert (results.tuned.model, results.tuned.best.instances) == (NAME, 2)
    config = from_text((tmp_path / "out" / "model_repository" / NAME / "config.pbtxt").read_text())
    assert config.instance_group[0].count == 2
