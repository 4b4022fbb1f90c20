"""An encoder-decoder in the real server, behind the front. Needs the server environment."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from foundation.artifacts.artifact import Artifact
from foundation.core.decoding import Decoding
from foundation.core.engines import served_on
from foundation.standalone.encoder_decoder import DECODER
from tests.export.engines.test_openvino_seq2seq import engine, spec
from tests.export.generation.genai_checkpoints import tokenizer
from tests.export.generation.tiny_encoder_decoders import checkpoint, folder, sources
from triton_repo import environment, layout
from triton_repo.client import RequestError
from triton_repo.generation.client import LanguageClient, greedy
from triton_repo.generation.layout import write_language_repository
from triton_repo.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME, TOKENS = "t5-fp32", 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("encoder-decoder")
    place = root / "export" / NAME
    place.mkdir(parents=True)
    (place / "seq2seq").symlink_to(folder("t5"))
    for name in ("preprocess.json", "tokenizer.json"):
        (place / name).write_bytes((checkpoint("t5") / name).read_bytes())
    save_file({"prompts": np.zeros((1, 1), np.int32), "tokens": np.zeros((1, 1), np.int32)}, place / "answers.safetensors")
    entry = {
        "engine": "openvino_seq2seq",
        "mode": "stateful",
        "float_precision": "fp32",
        "runnable": True,
        "file": f"{NAME}/seq2seq/{DECODER}",
        "properties": dict(spec("t5").properties),
        "generation": {"file": f"{NAME}/answers.safetensors"},
    }
    build = {"variant": "t5", "precision": "fp32", "folder": NAME, "onnx": "model.onnx", "engines": [entry]}
    (root / "export" / "export.json").write_text(json.dumps({"schema": 1, "builds": [build]}))
    models = layout.served_models(Artifact(root / "export", {"digest": "0"}), served_on("cpu", generates=True, encoder_decoder=True))
    write_language_repository(root / "repository", models, batch_sizes=(1, 8))
    with Service(root / "repository", environment.check(), root / "log") as started:
        yield started


def expected(asked: list[np.ndarray], **settings: object) -> list[list[int]]:
    return [list(answer.tokens[0]) for answer in engine("t5").generate(asked, Decoding(**{"max_tokens": TOKENS, **settings}))]  # type: ignore[arg-type]


def test_answers_side_by_side_are_those_of_the_engine(running: Service) -> None:
    asked = sources((3, 9, 14, 1, 7, 5, 20, 2) * 3, seed=21)
    found = greedy(running.grpc_address, NAME, asked, TOKENS, 8)
    assert found.tolist() == expected(asked, ignore_end=True)


def test_a_search_and_a_stream_are_those_of_the_engine(running: Service) -> None:
    (asked,) = sources((6,), seed=22)
    with LanguageClient(running.grpc_address, NAME) as client:
        settings = {"max_tokens": TOKENS, "ignore_eos": True, "repetition_penalty": 3.0}
        best = [piece.tokens for piece in client.stream(ids=asked.tolist(), beams=3, answers=2, stream=False, **settings)]
        pieces = list(client.stream(ids=asked.tolist(), **settings))
    decoding = Decoding(max_tokens=TOKENS, ignore_end=True, repetition_penalty=3.0, beams=3, answers=2)
    assert best == [list(one) for one in engine("t5").generate([asked], decoding)[0].tokens]
    streamed = [token for piece in pieces for token in piece.tokens]
    assert streamed == expected([asked], ignore_end=True, repetition_penalty=3.0)[0]
    assert "".join(piece.text for piece in pieces) == tokenizer().decode(streamed, skip_special_tokens=True)
    assert pieces[-1].prompt_tokens == 6


def test_texts_over_http_and_what_is_refused(running: Service, tmp_path: Path) -> None:
    url = f"http://{running.http_address}/v2/models/{NAME}/generate"
    body = json.dumps({"TEXT": "abcab", "MAX_TOKENS": TOKENS, "STREAM": False}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60) as reply:
        answer = json.loads(reply.read())
    ids = np.array(tokenizer()("abcab")["input_ids"], np.int32)
    assert answer["TOKENS"] == expected([ids])[0]
    with LanguageClient(running.grpc_address, NAME) as client:
        with pytest.raises(RequestError, match="no chat template"):
            list(client.stream(text="a", chat=True))
        with pytest.raises(RequestError, match="2049 ids given; 1 to 2048 are allowed"):
            list(client.stream(ids=[5] * 2049))
        with pytest.raises(RequestError, match="MAX_TOKENS up to 2047 is allowed"):
            list(client.stream(ids=[5], max_tokens=2048))


def test_many_at_once_answer_alike(running: Service) -> None:
    asked = sources(tuple(1 + number % 17 for number in range(60)), seed=23)

    def one(source: np.ndarray) -> list[int]:
        with LanguageClient(running.grpc_address, NAME) as client:
            return [token for piece in client.stream(ids=source.tolist(), max_tokens=TOKENS) for token in piece.tokens]

    with ThreadPoolExecutor(30) as pool:
        assert list(pool.map(one, asked)) == expected(asked)
