"""A model that is rolled over while it answers, in the real server: python -m pytest tests/triton_repo/test_roll_over.py"""

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc import model_config_pb2 as pb

from foundation.core.errors import InputError
from tests.triton_repo import tiny_exports as tiny
from triton_repo import client, environment, layout, service
from triton_repo.config import ModelSettings, model_config
from triton_repo.roll_over import differences
from triton_repo.server import ServerError

MODEL = "text-fp32"
NEW_BUCKETS = (16,)
"""The second version pads to one length alone, so its folder and warm-up differ from those of the first."""


def repository(root: Path, buckets: tuple[int, ...] = tiny.BUCKETS) -> Path:
    exported = tiny.export(root / "export", tiny.text_preprocessor(buckets=buckets), tiny.TEXTS, (("text", "fp32"),))
    layout.write_repository(root / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1, 8))
    return root / "repository"


class Asking:
    """Clients that ask without a pause, and note which version answers."""

    def __init__(self, address: str, count: int = 3) -> None:
        self.versions, self.failures, self._over = [], [], threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(address,)) for _ in range(count)]

    def _ask(self, address: str) -> None:
        with InferenceServerClient(address) as asking:
            while not self._over.is_set():
                try:
                    self.versions.append(client.infer(asking, MODEL, "a fine film").get_response().model_version)
                except client.RequestError as error:
                    self.failures.append(str(error))

    def __enter__(self):
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for one in self._threads:
            one.join()


def golden(address: str, version: str) -> None:
    answers = client.evaluate(address, MODEL, tiny.TEXTS, version=version)
    np.testing.assert_allclose(answers.logits, tiny.expected(tiny.text_preprocessor(), tiny.TEXTS), atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_roll_overs_and_failed_ones_lose_no_request(tmp_path):
    first, second = repository(tmp_path / "1"), repository(tmp_path / "2", NEW_BUCKETS) / MODEL
    broken = tmp_path / "broken"
    shutil.copytree(second, broken)
    (broken / "1" / "openvino.xml").write_text("<nothing>")

    def wrong(address: str, version: str) -> None:
        assert set(seen.versions) == {"1"}  # the new version is loaded, and nobody has been sent there
        golden(address, version)
        raise InputError("m", "the answers are wrong")

    with service.Service(first, environment.check(), tmp_path / "log") as running:
        with Asking(running.grpc_address) as seen:
            with pytest.raises(InputError, match=r"model other: not served here; text-fp32 is"):
                running.roll_over("other", second, golden)
            with pytest.raises(ServerError, match="Unable to read the model"):
                running.roll_over(MODEL, broken, golden)
            with pytest.raises(InputError, match="the answers are wrong"):
                running.roll_over(MODEL, second, wrong)
            assert set(seen.versions) == {"1"}
            rolled = running.roll_over(MODEL, second, golden)
            time.sleep(0.5)
            after = len(seen.versions)
            time.sleep(0.5)
        assert (rolled.before, rolled.after) == ("1", "2")
        assert seen.failures == []
        assert set(seen.versions[after:]) == {"2"}
        assert len(seen.versions) > after > 100
        with InferenceServerClient(running.grpc_address) as asking:
            assert list(asking.get_model_metadata(MODEL).versions) == ["2"]
        # a server that is started again has the new version
        running._triton._process.kill()
        running._triton._process.wait()
        deadline = time.monotonic() + 60
        while running.deaths == 0 or not running._triton.is_alive:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with InferenceServerClient(running.grpc_address) as asking:
            assert list(asking.get_model_metadata(MODEL).versions) == ["2"]
        golden(running.grpc_address, "")
        rolled = running.roll_over(MODEL, first / MODEL, golden)
        assert (rolled.before, rolled.after) == ("2", "3")
        assert running.deaths == 1  # the end of an old version is not taken for a death


def settings(**changes) -> pb.ModelConfig:
    given = {"modality": "text", "pairs": False, "width": 3, "engine": "openvino", "max_batch_size": 8, **changes}
    return model_config(ModelSettings(name="m", batch_sizes=(1,), mode="static", properties={}, **given))


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"max_batch_size": 16}, []),
        ({"engine": "onnxruntime"}, []),
        ({"max_batch_size": 4}, ["the new version takes 4 rows in a request, the present one 8"]),
        ({"width": 2}, ["output LOGITS is not the same in the new version"]),
        ({"pairs": True}, ["input TEXT_PAIR is not the same in the new version"]),
        ({"modality": "image"}, ["input IMAGE is not the same in the new version", "input TEXT is not the same in the new version"]),
    ],
)
def test_what_clients_would_notice_is_refused(changes, lines):
    assert list(differences(settings(), settings(**changes))) == lines


def test_models_that_generate_are_refused():
    decoupled = settings()
    decoupled.model_transaction_policy.decoupled = True
    assert list(differences(settings(), decoupled)) == ["models that generate are not rolled over"]
