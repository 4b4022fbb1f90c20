"""How the stage checks and times a language model: with a server and an engine made up here, and once with the real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compress.recipe import check as checked
from compress.run.prepare import _engine_job
from foundation.artifacts.exported import Build, Engine, Generation
from foundation.artifacts.figures import Percentiles
from foundation.artifacts.triton import Load
from foundation.core.decoding import Answer, Decoding
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.measure.tokens import save_answers
from foundation.stage.context import Context
from tests.test_generation import recipe
from tests.test_proposals import TARGET, stages
from tests.told import Told
from tests.triton_repo.generation import tiny_language as tiny
from triton_repo import environment, layout, server
from triton_repo.client import RequestError
from triton_repo.config import from_text
from triton_repo.generation import check, client
from triton_repo.generation.config import LanguageSettings
from triton_repo.triton_repo import TritonRepo

SECONDS = 7.0
"""Most time for an answer; the client waits as long."""
PROMPTS, TOKENS = 70, 5


class Alone:
    """Gives every token a second after the one before."""

    def __init__(self, job: Any) -> None:
        self.job, self.asked = job, []  # type: ignore[var-annotated]

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: Sequence[np.ndarray], decoding: Decoding) -> list[Answer]:
        self.asked.append(([prompt.tolist() for prompt in prompts], decoding))
        count = decoding.max_tokens
        return [Answer((tuple(range(count)),), tuple(float(1 + one) for one in range(count))) for _ in prompts]


@pytest.fixture
def model(tmp_path: Path) -> layout.Served:
    """A model with 70 answers of 5 tokens on record."""
    random = np.random.default_rng(0)
    recorded = {"prompts": random.integers(3, 99, (PROMPTS, 9)), "tokens": random.integers(3, 99, (PROMPTS, TOKENS))}
    save_file({name: values.astype(np.int32) for name, values in recorded.items()}, tmp_path / "answers.safetensors")
    generation = Generation(file="answers.safetensors")
    entry = Engine(engine="openvino_genai", mode="paged", float_precision="fp32", file="model.xml", generation=generation)
    return layout.Served("llama-fp32", "llama", "fp32", tmp_path, entry, tmp_path)


def settings(max_running: int = 8, max_waiting: int = 64) -> LanguageSettings:
    return LanguageSettings("llama-fp32", "paged", "decoder", {}, 64, 100, max_running, max_waiting=max_waiting, request_seconds=SECONDS)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, model: layout.Served) -> list[Any]:
    """Puts a server in place that answers as recorded, 20 tokens per second and stream; returns what it is asked."""
    asked: list[Any] = []

    def greedy(_: str, __: str, prompts: Sequence[np.ndarray], tokens: int, at_once: int, *, ends: bool, **limits: float) -> np.ndarray:
        assert limits == {"request_seconds": SECONDS}
        asked.append((len(prompts), tokens, at_once))
        return check.recorded(model)[1]

    def load(_: str, __: str, prompts: Sequence[np.ndarray], tokens: int, count: int, **limits: Any) -> Load:
        assert limits["request_seconds"] == SECONDS
        asked.append((len(prompts), tokens, count))
        return Load(concurrency=count, first_token_ms=Percentiles(p50=1.0), tokens_per_s=0.75 * count)

    class Server:
        grpc_address = "nowhere"

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def peak_memory_bytes(self) -> int:
            return 10**8

    monkeypatch.setattr(check, "check_texts", lambda *_, **__: 9)
    monkeypatch.setattr(client, "greedy", greedy)
    monkeypatch.setattr(client, "load", load)
    monkeypatch.setattr(server, "TritonServer", Server)
    monkeypatch.setattr(environment, "check", lambda: None)
    monkeypatch.setattr(check, "EngineProcess", Alone)
    return asked


def context(folder: Path, **given: Any) -> Context:
    return Context("text-generation", None, 16, Target(), 0, Told(), folder, **given)  # type: ignore[arg-type]


def job(root: Path, build: Build, engine: Engine, proposals: bool) -> Any:
    return build.precision, engine.mode, proposals


def test_every_prompt_is_compared_and_every_load_stands_beside_the_engine(model: layout.Served, asked: list[Any], tmp_path: Path) -> None:
    given = context(tmp_path, engine_job=job)
    found = check.measure(model, settings(), tmp_path, given, [1, 4, 8])
    assert asked == [(PROMPTS, TOKENS, at_once) for at_once in (8, 1, 4, 8)]
    assert found.tokens is not None
    assert found.tokens.identical == found.tokens.prompts == PROMPTS
    assert [(row.concurrency, row.engine_tokens_per_s, row.engine_share) for row in found.latency] == [
        (1, 1.0, 0.75),
        (4, 4.0, 0.75),
        (8, 8.0, 0.75),
    ]
    assert given.progress.lines == [  # type: ignore[attr-defined]
        "  llama-fp32 in Triton: 70 of 70 answers of 5 tokens equal the engine, 9 texts are read as Transformers reads "
        "them, first token after 1.0 ms, "
        "6.0 tokens/s over 8, 0.75 of the engine alone"
    ]


def test_prompts_of_several_lengths_are_asked_too(
    model: layout.Served, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, answers = tiny.prompts((9, 300, 4)), np.arange(12, dtype=np.int32).reshape(3, 4)
    save_answers(tmp_path / "answers.safetensors", *check.recorded(model), (rows, answers))
    groups: list[tuple[list[int], int, int]] = []
    wrong = 0

    def greedy(_: str, __: str, prompts: Sequence[np.ndarray], tokens: int, at_once: int, *, ends: bool, **limits: float) -> np.ndarray:
        groups.append(([len(prompt) for prompt in prompts], tokens, at_once))
        return check.recorded(model)[1] if len(prompts) == PROMPTS else answers + wrong

    monkeypatch.setattr(client, "greedy", greedy)
    found = check.measure(model, settings(), tmp_path, context(tmp_path), [4])
    assert groups == [([9] * PROMPTS, TOKENS, 8), ([9, 300, 4], 4, 8)]
    assert found.tokens is not None
    assert found.tokens.prompts == found.tokens.identical == PROMPTS
    wrong = 1
    with pytest.raises(check.ServedWrong, match="in 3 of 3 answers; first prompt 0, token 0"):
        check.measure(model, settings(), tmp_path, context(tmp_path), [4])


def test_outside_a_run_no_engine_stands_beside(model: layout.Served, asked: list[Any], tmp_path: Path) -> None:
    [row] = check.measure(model, settings(), tmp_path, context(tmp_path), [4]).latency
    assert (row.tokens_per_s, row.engine_tokens_per_s, row.engine_share) == (3.0, None, None)


def test_no_more_is_asked_at_once_than_the_model_takes(model: layout.Served, asked: list[Any], tmp_path: Path) -> None:
    given = context(tmp_path)
    found = check.measure(model, settings(max_running=1, max_waiting=2), tmp_path, given, [1, 3, 4, 8])
    assert [at_once for _, _, at_once in asked] == [3, 1, 3]
    assert [row.concurrency for row in found.latency] == [1, 3]
    expected = "llama-fp32: not timed at 8 answers at once, since it takes 3 requests; raise triton_repo.max_waiting"
    assert given.progress.warnings[0] == expected  # type: ignore[attr-defined]
    assert check.measure(model, settings(max_running=1, max_waiting=2), tmp_path, given, [4]).latency == ()


def test_the_engine_alone_answers_the_same_prompts_in_turn(model: layout.Served) -> None:
    engine, prompts = Alone(None), check.recorded(model)[0]
    assert check.engine_rate(engine, prompts, TOKENS, 8) == 8.0  # type: ignore[arg-type]
    warm_up, *turns = engine.asked
    assert (len(warm_up[0]), warm_up[1].max_tokens) == (8, 4)
    assert len(turns) == 25  # 200 answers
    assert all(decoding == Decoding(max_tokens=TOKENS, ignore_end=True) for _, decoding in turns)
    first, second = turns[0][0], turns[1][0]
    assert first == [prompt.tolist() for prompt in prompts[8:16]]
    assert second == [prompt.tolist() for prompt in prompts[16:24]]


@pytest.mark.parametrize("seconds", [7.0, 600.0, 1e6])
def test_the_client_waits_longer_than_the_model_may_take(seconds: float) -> None:
    assert client.LanguageClient("localhost:1", "m", request_seconds=seconds)._seconds > seconds


def test_an_answer_that_a_time_limit_cut_off_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Late:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def stream(self, **_: object) -> list[client.Piece]:
            return [client.Piece("a", [5]), client.Piece("", [], finish_reason="timeout")]

    monkeypatch.setattr(client, "LanguageClient", Late)
    line = r"model m: 1 tokens came, 4 were asked for \(timeout\); raise triton_repo.request_seconds"
    with pytest.raises(RequestError, match=line):
        client.greedy("nowhere", "m", [np.array([5], np.int32)], 4, 1)


class Streams:
    """Stands for the client of Triton: every answer is one token, then the end; counts its streams."""

    opened = 0

    def __init__(self, address: str) -> None:
        self._callback: Any = None

    def start_stream(self, callback: Any) -> None:
        assert self._callback is None, "a stream is open"
        self._callback, Streams.opened = callback, Streams.opened + 1

    def async_stream_infer(self, model: str, tensors: Any) -> None:
        for last in (False, True):
            self._callback(Result(last), None)

    def stop_stream(self, *, cancel_requests: bool) -> None:
        assert cancel_requests
        if self._callback is not None:
            self._callback(None, Exception("cancelled"))
        self._callback = None

    def close(self) -> None:
        assert self._callback is None


@dataclass(frozen=True)
class Result:
    last: bool

    def as_numpy(self, name: str) -> Any:
        known = {"TEXT": np.array([b"a"], np.object_), "TOKENS": np.array([5]), "INDEX": np.array([0])}
        return known.get(name)

    def get_response(self) -> Any:
        return SimpleNamespace(parameters={client.FINAL: SimpleNamespace(bool_param=self.last)})


def test_answers_read_to_their_end_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritonclient.grpc.InferenceServerClient", Streams)
    Streams.opened = 0
    with client.LanguageClient("nowhere", "m") as asked:
        for _ in range(3):
            assert [piece.tokens for piece in asked.stream(ids=[5])] == [[5], [5]]
        assert Streams.opened == 1
        left = asked.stream(ids=[5])
        next(left)
        with pytest.raises(RequestError, match="under way"):
            next(asked.stream(ids=[5]))
        left.close()
        assert [piece.tokens for piece in asked.stream(ids=[5])] == [[5], [5]], "nothing is left of the answer that was given up"
        assert Streams.opened == 2
        asked._responses.put((None, Exception("the server has ended the stream")))  # type: ignore[union-attr, arg-type]
        assert len(list(asked.stream(ids=[5]))) == 2
        assert Streams.opened == 3


def served(**keys: Any) -> TritonRepo:
    stage = recipe(target=TARGET, stages=[*stages(), {"triton_repo": keys}]).stages[-1]
    assert isinstance(stage, TritonRepo)
    return stage


@pytest.mark.whole
def test_the_queue_is_set_in_the_recipe_and_stands_in_the_configuration(tmp_path: Path) -> None:
    exported = tiny.export(tmp_path / "export", count=2)
    for name, stage in (("set", served(max_waiting=3, request_seconds=1.5, serve=False)), ("default", served(serve=False))):
        (tmp_path / name).mkdir()
        stage.run(exported, context(tmp_path), tmp_path / name)
    given, default = (tmp_path / name / "model_repository" for name in ("set", "default"))
    for repository, waiting, seconds in ((given, "3", "1.5"), (default, "64", "600")):
        parameters = from_text((repository / "llama-fp32" / "config.pbtxt").read_text()).parameters
        assert parameters["max_waiting"].string_value == waiting
        assert parameters["request_seconds"].string_value == seconds
        assert f"| 8 | {waiting} | {seconds} |" in (repository / "README.md").read_text()


def test_a_recipe_without_the_queue_keeps_its_cache_key() -> None:
    assert served().model_dump(mode="json") == {
        "id": "triton_repo",
        "serve": True,
        "max_batch_size": None,
        "instances": 1,
        "max_queue_delay_us": 0,
        "concurrency": [1, 4],
    }
    assert served(max_waiting=64, request_seconds=600).model_dump(mode="json") == served().model_dump(mode="json")
    assert served(max_waiting=0).model_dump(mode="json")["max_waiting"] == 0
    assert served(request_seconds=2).model_dump(mode="json")["request_seconds"] == 2.0


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"max_waiting": -1}, "max_waiting: -1 given; "),
        ({"max_waiting": 1.5}, "max_waiting: 1.5 given; "),
        ({"request_seconds": 0}, "request_seconds: 0 given; "),
        ({"instances": 2}, "stages.triton_repo.instances: 2 given; a language model has one process"),
        ({"max_queue_delay_us": 9}, "stages.triton_repo.max_queue_delay_us: 9 given; a language model has one process"),
    ],
)
def test_wrong_keys_are_one_line(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        served(**keys)
    [problem] = str(caught.value).splitlines()
    assert line in problem


@pytest.mark.parametrize(
    ("task", "device", "more"),
    [("text-classification", "cpu", {}), ("text-generation", "cuda", {"vllm": {}})],
)
@pytest.mark.parametrize(("key", "value"), [("max_waiting", 3), ("request_seconds", 7)])
def test_a_queue_that_nothing_reads_is_refused(task: str, device: str, more: dict[str, Any], key: str, value: int) -> None:
    asked = {
        "name": "x",
        "model": {"path": "owner/model", "task": task},
        "data": {"path": "owner/data"},
        "target": {"device": device, "engines": ["openvino" if device == "cpu" else "onnxruntime"]},
        "stages": [{"quantize": {"scheme": "w4a16"}}, {"export": {}}, {"triton_repo": {key: value, **more}}],
    }
    with pytest.raises(InputError) as caught:
        checked(asked)
    places = "served on the cpu or by torch_kernels_decoder"
    line = f"stages.triton_repo.{key}: {value} given; it is for language models that are {places}: leave it out"
    assert line in str(caught.value).splitlines()


def test_the_streams_are_part_of_the_cache_key_of_language_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "check", lambda: SimpleNamespace(versions={"openvino": "1"}))
    assert TritonRepo().depends(context(tmp_path)) == {"openvino": "1", "streams": [1, 4, 8]}
    assert TritonRepo(concurrency=(16, 2)).depends(context(tmp_path)) == {"openvino": "1", "streams": [2, 8, 16]}
    other = Context("text-classification", None, 16, Target(), 0, Told(), tmp_path)  # type: ignore[arg-type]
    assert TritonRepo().depends(other) == {"openvino": "1"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_stage_asks_the_real_server_every_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = tiny.export(tmp_path / "export", (("llama", "paged"), ("mistral", "stateful")), count=PROMPTS, tokens=TOKENS)
    file = exported.path / "llama-fp32" / "answers.safetensors"
    recorded = load_file(file)
    recorded["tokens"][-2] = (recorded["tokens"][-2] + 1) % 100  # one wrong answer of so many is tolerated, and told
    save_file(recorded, file)
    target = Target(**TARGET)  # type: ignore[arg-type]
    monkeypatch.setattr(check, "SECONDS", 0.5)
    given = Context(
        "text-generation",
        None,
        16,
        target,
        0,
        Told(),
        tmp_path,
        engine_job=partial(_engine_job, target),  # type: ignore[arg-type]
    )
    (tmp_path / "out").mkdir()
    TritonRepo().run(exported, given, tmp_path / "out")
    paged, stateful = json.loads((tmp_path / "out" / "triton.json").read_text())["models"]
    assert (paged["tokens"]["prompts"], paged["disagreements"]) == (PROMPTS, 1)
    assert (stateful["tokens"]["prompts"], stateful["disagreements"]) == (PROMPTS, 0)
    for model in (paged, stateful):
        assert model["texts"] >= 10
        assert [row["concurrency"] for row in model["latency"]] == [1, 4, 8]
        for row in model["latency"]:
            assert row["engine_share"] == pytest.approx(row["tokens_per_s"] / row["engine_tokens_per_s"], abs=1e-3)


def test_a_server_of_an_engine_that_rounds_may_differ_as_often_as_the_engine_from_itself() -> None:
    random = np.random.default_rng(0)
    expected = random.integers(3, 99, (100, 8)).astype(np.int32)

    def turned(count: int) -> np.ndarray:
        answers = expected.copy()
        answers[:count, 4:] += 1  # one token, and all that follow it
        return answers

    assert check.compare("m", expected, turned(0)).disagreements == 0
    with pytest.raises(check.ServedWrong, match="first prompt 0, token 4"):
        check.compare("m", expected, turned(20))
    assert check.compare("m", expected, turned(20), lambda: turned(20)).passed
    with pytest.raises(check.ServedWrong, match="asked one prompt at a time, the engine itself differs in 19"):
        check.compare("m", expected, turned(20), lambda: turned(19))
    check.compare("m", expected, turned(0), lambda: pytest.fail("the engine need not be asked"))


def test_the_engine_is_asked_one_prompt_at_a_time() -> None:
    engine = Alone(None)
    prompts, expected = [np.array([4, 5], np.int32), np.array([6], np.int32)], np.zeros((2, 3), np.int32)
    assert check._one_by_one(engine, prompts, expected).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert [asked for asked, _ in engine.asked] == [[[4, 5]], [[6]]]
    assert all(decoding.ignore_end and decoding.max_tokens == 3 for _, decoding in engine.asked)
