"""Questions to a server that somebody else runs: python -m pytest -m slow tests/triton_repo/test_probe.py"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foundation.core.errors import InputError
from foundation.standalone.response import RESPONSES
from tests.triton_repo import tiny_exports as tiny
from triton_repo import environment, layout, service
from triton_repo.client import Answers
from triton_repo.config import from_text, to_text
from triton_repo.load.connection import Address, address_of
from triton_repo.probe import Probe
from triton_repo.server import free_port

MODEL = "text-fp32"


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("probe")
    exported = tiny.export(root / "export", tiny.text_preprocessor(), tiny.TEXTS, (("text", "fp32"),))
    layout.write_repository(root / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1, 8))
    return root / "repository"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_running_server_over_both_protocols(repository, tmp_path):
    logits = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS)
    other = tmp_path / MODEL
    other.mkdir()
    config = from_text((repository / MODEL / "config.pbtxt").read_text())
    config.output[2].dims[:] = [5]
    config.input.add(name="TEXT_PAIR", data_type=config.input[0].data_type, dims=[1])
    (other / "config.pbtxt").write_text(to_text(config))
    with service.Service(repository, environment.check(), tmp_path / "log") as running:
        for protocol, place in (("grpc", running.grpc_address), ("http", running.http_address)):
            with Probe(Address(protocol, place)) as asked:
                assert asked.about().startswith("triton 2.")
                assert asked.differences(repository / MODEL) == []
                answers = asked.answers(MODEL, tiny.TEXTS)
                np.testing.assert_allclose(answers.logits, logits, atol=1e-6)
                assert asked.contradictions(repository / MODEL, answers) == []
                assert [*map(str, asked.differences(other))] == [
                    "text-fp32: input TEXT_PAIR: missing; BYTES [-1, 1] expected",
                    "text-fp32: output LOGITS: FP32 [-1, 3]; FP32 [-1, 5] expected",
                ]
                config.name = "absent"
                (other / "config.pbtxt").write_text(to_text(config))
                [line] = map(str, asked.differences(other))
                assert line.startswith("absent: ")
                assert "does not serve it" in line
                config.name = MODEL
                (other / "config.pbtxt").write_text(to_text(config))
                with pytest.raises(InputError, match=r"absent: row 0 of 1 has no answer \("):
                    asked.answers("absent", ["a"])


def test_answers_that_contradict_themselves(repository):
    prepared = tiny.text_preprocessor()
    logits = tiny.expected(prepared, tiny.TEXTS).astype(np.float32)
    outputs = RESPONSES[prepared.response].of(logits, prepared.labels)
    good = Answers(outputs.pop("LOGITS"), outputs)
    probe = Probe(Address("grpc", "127.0.0.1:1"))
    model = repository / MODEL
    assert probe.contradictions(model, good) == []
    other = next(label for label in tiny.LABELS if label.encode() != outputs["LABEL"][2, 0])
    labels, scores = outputs["LABEL"].copy(), outputs["SCORE"].copy()
    labels[2], scores[3] = other.encode(), scores[3] + 1
    found = [
        probe.contradictions(model, replace(good, outputs={**outputs, "LABEL": labels})),
        probe.contradictions(model, replace(good, outputs={**outputs, "SCORE": scores})),
        probe.contradictions(model, replace(good, logits=logits.astype(np.float64))),
    ]
    assert [len(lines) for lines in found] == [1, 1, 1]
    assert f"row 2 has LABEL {other!r}" in str(found[0][0])
    assert "row 3 has SCORE" in str(found[1][0])
    assert "what the engine computed is float64; float32 expected" in str(found[2][0])


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_nobody_there(protocol):
    with (
        pytest.raises(InputError, match=rf"--url {protocol}://127.0.0.1:\d+: no answer"),
        Probe(Address(protocol, f"127.0.0.1:{free_port()}")),
    ):
        pass


def test_a_url_that_is_none():
    with pytest.raises(InputError, match="--url 'x': host:port is allowed"):
        address_of("x", None, "--url")
