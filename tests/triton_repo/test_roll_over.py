"""A model that is rolled over while it answers, in the real server: python -m pytest tests/triton_repo/test_roll_over.py"""

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc import model_config_pb2 as pb
from tritonclient.utils import InferenceServerException

from foundation.core.errors import InputError
from tests.triton_repo import tiny_exports as tiny
from triton_repo import client, environment, layout, service
from triton_repo.config import ModelSettings, from_text, model_config, to_text
from triton_repo.entrance import Entrance
from triton_repo.live import LiveRepository
from triton_repo.queueing import Queue, write_policy
from triton_repo.roll_over import differences, roll_over
from triton_repo.server import ServerError

MODEL = "text-fp32"
NEW_BUCKETS = (16,)
"""The second version pads to one length alone, so its folder and warm-up differ from those of the first."""


def repository(root: Path, buckets: tuple[int, ...] = tiny.BUCKETS) -> Path:
    exported = tiny.export(root / "export", tiny.text_preprocessor(buckets=buckets), tiny.TEXTS, (("text", "fp32"),))
    layout.write_repository(root / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1, 8))
    return root / "repository"


class Asking:
    """Clients that ask without a pause, and note which version answers, and whether the logits are right."""

    def __init__(self, address: str, count: int = 3) -> None:
        self.versions, self.failures, self.wrong, self._over = [], [], 0, threading.Event()
        self._right = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS)
        self._threads = [threading.Thread(target=self._ask, args=(address,)) for _ in range(count)]

    def _ask(self, address: str) -> None:
        with InferenceServerClient(address) as asking:
            while not self._over.is_set():
                row = len(self.versions) % len(tiny.TEXTS)
                try:
                    answer = client.infer(asking, MODEL, tiny.TEXTS[row])
                except client.RequestError as error:
                    self.failures.append(str(error))
                    continue
                self.versions.append(answer.get_response().model_version)
                self.wrong += not np.allclose(answer.as_numpy("LOGITS")[0], self._right[row], atol=1e-5)

    def __enter__(self):
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for one in self._threads:
            one.join()


def asked(asking: InferenceServerClient, version: str) -> None:
    """Asks one version of the model by its number."""
    try:
        asking.infer(MODEL, client.tensors([tiny.TEXTS[0]], InferInput), model_version=version)
    except InferenceServerException as error:
        raise client.RequestError(error.message()) from error


def golden(address: str, model: str) -> None:
    answers = client.evaluate(address, model, tiny.TEXTS)
    np.testing.assert_allclose(answers.logits, tiny.expected(tiny.text_preprocessor(), tiny.TEXTS), atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("grpc", ["front", "triton"])
def test_roll_overs_and_failed_ones_lose_no_request(grpc, tmp_path):
    first, second = repository(tmp_path / "1"), repository(tmp_path / "2", NEW_BUCKETS) / MODEL
    broken = tmp_path / "broken"
    shutil.copytree(second, broken)
    (broken / "1" / "openvino.xml").write_text("<nothing>")

    def wrong(address: str, candidate: str) -> None:
        assert set(seen.versions) == {"1"}  # the new version is loaded, and nobody has been sent there
        golden(address, candidate)
        with pytest.raises(client.RequestError, match="version 2 is not found"), InferenceServerClient(address) as asking:
            asked(asking, "2")
        raise InputError("m", "the answers are wrong")

    with service.Service(first, environment.check(), tmp_path / "log", entrance=Entrance(grpc=grpc)) as running:
        with Asking(running.grpc_address) as seen:
            with pytest.raises(InputError, match=r"model other: not served here; text-fp32 is"):
                running.roll_over("other", second, golden)
            with pytest.raises(ServerError, match="Unable to read the model"):
                running.roll_over(MODEL, broken, golden)
            with pytest.raises(InputError, match="the answers are wrong"):
                running.roll_over(MODEL, second, wrong)
            assert set(seen.versions) == {"1"}
            assert {path.name for path in running._live.folder.iterdir()} == {MODEL, "routes.json"}
            rolled = running.roll_over(MODEL, second, golden)
            time.sleep(0.5)
            after = len(seen.versions)
            time.sleep(0.5)
        assert (rolled.before, rolled.after) == ("1", "2")
        assert (seen.failures, seen.wrong) == ([], 0)
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
        golden(running.grpc_address, MODEL)
        rolled = running.roll_over(MODEL, first / MODEL, golden)
        assert (rolled.before, rolled.after) == ("2", "3")
        assert running.deaths == 1  # the end of an old version is not taken for a death


class Triton:
    """A stand-in that notes what it is asked, and with which configuration; it fails at one of these."""

    grpc_address = "address"

    def __init__(self, folder: Path, fails: str = "") -> None:
        self.folder, self.fails, self.did = folder, fails, []

    def _do(self, verb: str, model: str) -> None:
        kind = "candidate" if "." in model else model
        self.did.append(f"{verb} {kind}")
        if self.did[-1] == self.fails:
            self.fails = ""
            raise ServerError(f"{verb} failed")

    def load(self, model: str, seconds: float) -> None:
        config = from_text((self.folder / model / "config.pbtxt").read_text())
        (version,) = config.version_policy.specific.versions
        assert (self.folder / model / str(version) / "model.py").exists()
        assert (self.folder / model / "warmup" / "8.TEXT").exists()
        limited = config.dynamic_batching.default_queue_policy.max_queue_size
        self._do(f"load version {version} with {limited} of", model)

    def unload(self, model: str) -> None:
        self._do("unload", model)

    def watch(self, model: str, version: str, instances: int) -> None:
        self._do(f"watch version {version} of", model)


def versions(root: Path) -> tuple[LiveRepository, Path]:
    """A repository whose model has a queue of 4, and a new version with a queue of 5."""
    for name, limit in (("first", 4), ("second", 5)):
        for part in ("1", "warmup"):
            (root / name / "m" / part).mkdir(parents=True)
        (root / name / "m" / "1" / "model.py").write_text(name)
        (root / name / "m" / "warmup" / "8.TEXT").write_text(name)
        config = settings()
        write_policy(config, Queue(max_requests=limit))
        (root / name / "m" / "config.pbtxt").write_text(to_text(config))
    return LiveRepository(root / "live", root / "first"), root / "second" / "m"


UNTOUCHED = ["load version 2 with 0 of candidate", "unload candidate"]


@pytest.mark.parametrize(
    ("fails", "did"),
    [
        ("load version 2 with 0 of candidate", UNTOUCHED),
        ("check", [UNTOUCHED[0], "check candidate", UNTOUCHED[1]]),
        ("unload candidate", [UNTOUCHED[0], "check candidate", UNTOUCHED[1], UNTOUCHED[1]]),
        (
            "load version 2 with 5 of m",
            [
                *(UNTOUCHED[0], "check candidate", UNTOUCHED[1], "load version 2 with 5 of m"),
                *("load version 1 with 4 of m", "watch version 1 of m"),
            ],
        ),
    ],
)
def test_whatever_fails_leaves_the_version_before(fails, did, tmp_path):
    live, source = versions(tmp_path)
    triton, routes = Triton(live.folder, fails), live.routes_file.read_text()

    def check(address: str, candidate: str) -> None:
        triton.did.append("check candidate")
        if fails == "check":
            raise InputError("m", "the answers are wrong")

    with pytest.raises((ServerError, InputError)):
        roll_over(triton, live, "m", source, check)
    assert triton.did == did
    assert live.routes_file.read_text() == routes
    assert list(live.config("m").version_policy.specific.versions) == [1]
    assert sorted(path.name for path in (live.folder / "m").iterdir()) == ["1", "config.pbtxt", "warmup"]
    assert sorted(path.name for path in live.folder.iterdir()) == ["m", "routes.json"]


def test_the_new_version_is_checked_before_it_is_a_version_of_the_model(tmp_path):
    live, source = versions(tmp_path)
    triton = Triton(live.folder)

    def check(address: str, candidate: str) -> None:
        assert address == triton.grpc_address
        assert candidate.startswith("m.")
        assert (live.folder / candidate / "warmup" / "8.TEXT").read_text() == "second"
        assert (live.folder / "m" / "warmup" / "8.TEXT").read_text() == "first"
        assert live.version("m") == "1"
        triton.did.append("check candidate")

    rolled = roll_over(triton, live, "m", source, check)
    assert (rolled.model, rolled.before, rolled.after) == ("m", "1", "2")
    assert triton.did == [UNTOUCHED[0], "check candidate", UNTOUCHED[1], "load version 2 with 5 of m", "watch version 2 of m"]
    assert json.loads(live.routes_file.read_text())["m"]["version"] == "2"
    assert json.loads(live.routes_file.read_text())["m"]["max_requests"] == 5
    assert sorted(path.name for path in (live.folder / "m").iterdir()) == ["2", "config.pbtxt", "warmup"]
    assert (live.folder / "m" / "warmup" / "8.TEXT").read_text() == "second"
    assert sorted(path.name for path in live.folder.iterdir()) == ["m", "routes.json"]


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
