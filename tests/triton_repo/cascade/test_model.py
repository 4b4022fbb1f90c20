"""The model of a cascade as it lies in a repository, with a stand-in for the server's Python module."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from foundation.standalone.response import RESPONSES, placed
from tests.triton_repo import tiny_exports as tiny
from tests.triton_repo.backend_stand_in import MetricFamily, TritonError, stand_in
from tests.triton_repo.cascade import tiny_cascades
from tests.triton_repo.test_cpu_model import request
from triton_repo.cascade.layout import NAME, cascade_of, write_cascade
from triton_repo.cascade.settings import Audit
from triton_repo.config import Scheduling, from_text

pytestmark = pytest.mark.whole

ROWS = tiny_cascades.texts(24)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Writes a repository with a cascade, and loads the model out of it as the server would."""
    loaded = []

    def load(thresholds, variants=("quantize", "baseline"), audit=0.0, form="class", distance=None):
        exported = tiny_cascades.export(tmp_path / "export", ROWS, variants, tiny_cascades.prepared(form))
        document = tiny_cascades.document(thresholds, variants, score=tiny_cascades.score_of(form), distance=distance)
        cascade = cascade_of(exported, document)
        about = {"pairs": False, "batch_sizes": (1, 4), "max_batch_size": 8, "scheduling": Scheduling()}
        write_cascade(tmp_path / "repository", cascade, Audit(share=audit), **about)
        folder = tmp_path / "repository" / NAME
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in())
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        for name in [one for one in sys.modules if one == "1" or one.startswith("1.")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        before = set(sys.modules)
        model = importlib.import_module("1.model").TritonPythonModel()
        config = MessageToDict(from_text((folder / "config.pbtxt").read_text()), preserving_proto_field_name=True)
        names = {"model_name": NAME, "model_version": "1", "model_instance_name": f"{NAME}_0_3"}
        model.initialize({"model_config": json.dumps(config), **names})
        loaded.append(model)
        assert sys.path[0] == str(folder)
        new = {name for name in set(sys.modules) - before if not name.startswith(("1", "openvino", NAME))}
        assert not new & {"model", "engine", "preprocess", "response", "windows", "long_text", "openvino_request"}
        return model

    yield load
    for model in loaded:
        model.finalize()
    for name in [one for one in sys.modules if one == "1" or one.startswith(("1.", f"{NAME}."))]:
        del sys.modules[name]


def requests_of(rows, size: int):
    return [request(*rows[start : start + size]) for start in range(0, len(rows), size)]


@pytest.mark.first(1)
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("tiers", [2, 3])
def test_every_row_has_the_answer_of_the_first_tier_that_is_sure(serve, size, tiers):
    variants = ("small", "quantize", "baseline")[-tiers:]
    thresholds = [tiny_cascades.middle(ROWS, variant) for variant in variants[:-1]]
    model = serve(thresholds, variants)
    logits, expected = tiny_cascades.answered(ROWS, thresholds, variants)
    assert set(expected) == set(range(1, tiers + 1)), "every tier has rows"
    responses = model.execute(requests_of(ROWS, size))
    assert [response.error for response in responses] == [None] * len(responses)
    joined = {name: np.concatenate([response.tensors[name] for response in responses]) for name in responses[0].tensors}
    assert joined["TIER"].tolist() == [[tier] for tier in expected]
    assert joined["TIER"].dtype == np.int32
    np.testing.assert_allclose(joined["LOGITS"], logits, atol=1e-6)
    wanted = RESPONSES["label"].of(logits, tiny.LABELS)
    assert joined["LABEL"].tolist() == wanted["LABEL"].tolist()
    np.testing.assert_allclose(joined["SCORE"], wanted["SCORE"], atol=1e-6)


DISTANCE = 1.0


def naive(form: str, rows, threshold: float) -> tuple[list[np.ndarray], list[int], list[bool]]:
    """Of each row, one after the other: the answer, its tier, and whether the last tier answers otherwise."""
    made = tiny_cascades.prepared(form)
    answers, tiers, wrong = [], [], []
    both = [tiny.padded(made, rows, tiny_cascades.SEEDS[variant]) for variant in ("quantize", "baseline")]
    for row, first, last in zip(rows, *both, strict=True):
        if form == "tags":  # a token is a word here, after [CLS]
            words = min(len(row.split()), made.max_length - 2)
            pairs = [(first[1 + word], last[1 + word]) for word in range(words)]
            sure = min(float(np.diff(np.sort(one.astype(np.float64))[-2:])[0]) for one, _ in pairs)
            other = any(one.argmax() != two.argmax() for one, two in pairs)
        elif form == "value":
            sure, other = float(first[0]), abs(float(first[0]) - float(last[0])) > DISTANCE
        else:
            sizes = [float(np.sqrt((one.astype(np.float64) ** 2).sum())) for one in (first, last, first.astype(np.float64) - last)]
            sure, other = float(first[0]) / sizes[0], sizes[2] > DISTANCE * sizes[1]
        keeps = sure >= threshold
        answers.append(first if keeps else last)
        tiers.append(1 if keeps else 2)
        wrong.append(keeps and other)
    return answers, tiers, wrong


@pytest.mark.first(1)
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize(("form", "threshold", "raw"), [("tags", 0.1, "LOGITS"), ("value", 0.5, "LOGITS"), ("vector", 0.1, "VECTOR")])
def test_tags_numbers_and_vectors_have_the_answer_of_the_tier_that_is_sure(serve, form, threshold, raw, size):
    MetricFamily.made.clear()
    model = serve([threshold], audit=1.0, form=form, distance=None if form == "tags" else DISTANCE)
    rows = [*ROWS, *tiny_cascades.WORDS]
    answers, tiers, wrong = naive(form, rows, threshold)
    assert set(tiers) == {1, 2}
    assert 0 < sum(wrong) < (tiers.count(1) if form == "tags" else len(rows)), "some that are kept are answered otherwise"
    responses = model.execute(requests_of(rows, size))
    found = [row for response in responses for row in response.tensors[raw]]
    assert [int(tier) for response in responses for tier in response.tensors["TIER"].reshape(-1)] == tiers
    for got, expected in zip(found, answers, strict=True):
        longest = expected[: len(got)]
        np.testing.assert_allclose(got, longest, atol=1e-6)
        assert not expected[len(got) :].any()
    if form == "tags":
        made = tiny_cascades.prepared(form)
        wanted = RESPONSES["entities"].of(np.stack(answers), made.labels, placed(made, rows))["ENTITIES"].reshape(-1).tolist()
        assert [value for response in responses for value in response.tensors["ENTITIES"].reshape(-1).tolist()] == wanted
    model.watch.close()
    assert (model.watch.audited, model.watch.disagreements) == (len(rows), sum(wrong))


@pytest.mark.parametrize(("threshold", "tier"), [(None, 1), (-3.4028234663852886e38, 0)])
def test_at_the_ends_of_the_threshold_it_is_one_tier_bit_by_bit(serve, threshold, tier):
    model = serve([threshold])
    responses = model.execute(requests_of(ROWS, 3))
    logits = np.concatenate([response.tensors["LOGITS"] for response in responses])
    np.testing.assert_array_equal(logits, tiny_cascades.logits(ROWS)[tier])
    assert {int(value) for response in responses for value in response.tensors["TIER"].reshape(-1)} == {tier + 1}


def test_escalated_rows_of_all_requests_are_batches_of_their_own(serve):
    threshold = tiny_cascades.middle(ROWS)
    model, sizes = serve([threshold]), {0: [], 1: []}
    for place, tier in enumerate(model.tiers):
        engine = (tier.model._model if place else tier.model).engine
        predict = engine.predict
        engine.predict = lambda features, sizes=sizes[place], predict=predict: sizes.append(len(features["input_ids"])) or predict(features)
    model.execute(requests_of(ROWS, 1))
    escalated = int((tiny_cascades.answered(ROWS, [threshold])[1] == 2).sum())
    assert (sum(sizes[0]), sum(sizes[1])) == (len(ROWS), escalated)
    assert max(sizes[1]) > 1, "of requests of one row each"


def test_a_bad_row_fails_its_own_request(serve):
    model = serve([tiny_cascades.middle(ROWS)])
    good, bad = model.execute([request(*ROWS[:3]), request(b"\xff")])
    assert good.error is None
    assert (bad.error.code, "not UTF-8" in str(bad.error)) == (TritonError.INVALID_ARG, True)
    assert int(model.watch.rows.sum()) + model.watch._waiting.qsize() <= 3


def test_a_failing_last_tier_fails_the_requests_that_need_it(serve):
    threshold = tiny_cascades.middle(ROWS)
    model = serve([threshold])

    def fail(features):
        raise RuntimeError("out of memory")

    model.tiers[-1].model._model.engine.predict = fail
    tiers = tiny_cascades.answered(ROWS, [threshold])[1]
    responses = model.execute(requests_of(ROWS, 1))
    assert [response.error is not None for response in responses] == (tiers == 2).tolist()


def test_what_it_answers_is_watched_and_warming_up_is_not(serve):
    threshold = tiny_cascades.middle(ROWS)
    MetricFamily.made.clear()
    model = serve([threshold], audit=1.0)
    model.execute(requests_of(ROWS, 2))
    model.watch.close()
    logits, tiers = tiny_cascades.answered(ROWS, [threshold])
    assert model.watch.rows.tolist() == [int((tiers == 1).sum()), int((tiers == 2).sum())]
    assert model.watch.audited == len(ROWS)
    others = int((logits.argmax(axis=1) != tiny_cascades.logits(ROWS)[1].argmax(axis=1)).sum())
    assert 0 < others == model.watch.disagreements
    [labels] = MetricFamily.made["compress_cascade_audited_rows_total"].metrics
    assert dict(labels) == {"model": NAME, "version": "1", "instance": "3"}


def test_tiers_of_other_lengths_prepare_their_rows_themselves(serve, monkeypatch):
    """The networks of the tiers may be padded to other lengths."""
    prepared = {"quantize": (16,), "baseline": tiny.BUCKETS}
    export = tiny.export

    def exported(root, preprocessor, rows, variants, **about):
        made = export(root, preprocessor, rows, variants, **about)
        for variant, buckets in prepared.items():
            folder = next(root.glob(f"{variant}-*"))
            replace(preprocessor, buckets=buckets).save(folder)
        return made

    monkeypatch.setattr(tiny, "export", exported)
    model = serve([tiny_cascades.middle(ROWS)])
    assert model.tiers[0].model.shapes == [(16,)]
    assert model.tiers[1].model._model.shapes == [(8,), (16,)]
    assert all(response.error is None for response in model.execute(requests_of(ROWS, 4)))
