"""A decoder on our kernels in the real server, on the CPU: kernels in the interpreter. Needs the server environment."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.artifacts.exported import Generation
from foundation.measure.tokens import save_answers
from tests.export.fused.decoder.decoders import LENGTH, WORDS
from tests.triton_repo.generation import tiny_kernels as tiny
from tests.triton_repo.generation.test_kernels import engine_answers
from triton_repo import environment
from triton_repo.client import RequestError
from triton_repo.config import from_text, to_text
from triton_repo.environment import ServerEnvironment
from triton_repo.generation import check
from triton_repo.generation.client import LanguageClient, Piece
from triton_repo.generation.config import LanguageSettings
from triton_repo.generation.layout import write_language_repository
from triton_repo.layout import Served, served_models
from triton_repo.server import TritonServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIBRARIES = ("torch", "torchgen", "functorch", "triton", "safetensors", "sympy", "mpmath", "networkx")
"""Packages that the server of kernels needs, and the environment of ours has not."""
PROMPTS, TOKENS = [[5, 9, 31, 7], [40, 4, 4, 18], [3, 8, 21, 6]], 5


@pytest.fixture(scope="module")
def server_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerEnvironment]:
    """The server environment with packages of the environment of the tests; its processes interpret kernels."""
    root, found = tmp_path_factory.mktemp("environment"), environment.check()
    packages = root / "lib" / f"python{found.python}" / "site-packages"
    packages.mkdir(parents=True)
    (root / "bin").symlink_to(found.path / "bin")
    shutil.copyfile(found.path / "pyvenv.cfg", root / "pyvenv.cfg")
    for entry in found.site.iterdir():
        (packages / entry.name).symlink_to(entry)
    for name in LIBRARIES:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (packages / name).symlink_to(Path(spec.origin).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield replace(found, path=root)


@dataclass(frozen=True)
class Written:
    """A repository, whose models run on the CPU here."""

    folder: Path
    model: Served
    settings: LanguageSettings
    expected: list[list[int]]
    """The greedy tokens of the engine."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, interpreted: Callable[..., Any]) -> Written:
    root = tmp_path_factory.mktemp("gr\u00f6\u00dfe")
    exported = tiny.export(root / "export", tiny.checkpoint(root, "gpt2"))
    expected = interpreted(engine_answers, tiny.spec(root / "export"), PROMPTS, TOKENS)
    save_answers(root / "export" / "answers.safetensors", np.array(PROMPTS, np.int32), np.array(expected, np.int32))
    (model,) = served_models(exported, (tiny.ENGINE,))
    entry = model.engine.with_(generation=Generation(file="answers.safetensors"))
    model = Served(model.name, model.variant, model.precision, model.folder, entry, model.root)
    (settings,) = write_language_repository(root / "repository", [model], batch_sizes=(1,), max_batch_size=3, max_waiting=2)
    path = root / "repository" / model.name / "config.pbtxt"
    config = from_text(path.read_text())
    config.instance_group[0].kind = config.instance_group[0].KIND_CPU
    path.write_text(to_text(config))
    return Written(root / "repository", model, settings, expected)


@pytest.fixture(scope="module")
def address(written: Written, server_environment: ServerEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with TritonServer(written.folder, server_environment, tmp_path_factory.mktemp("log") / "log") as server:
        yield server.grpc_address


def pieces(address: str, **asked: Any) -> list[Piece]:
    with LanguageClient(address, tiny.NAME, seconds=300) as client:
        return list(client.stream(**asked))


def tokens(found: list[Piece]) -> list[int]:
    return [token for piece in found for token in piece.tokens]


def test_streams_side_by_side_are_the_engines(address: str, written: Written) -> None:
    asked = [{"ids": prompt, "max_tokens": TOKENS, "ignore_eos": True, "piece_seconds": 0} for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: pieces(address, **one), asked))
    assert [tokens(one) for one in together] == written.expected
    assert [tokens(pieces(address, **one)) for one in asked] == written.expected
    last = together[0][-1]
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", len(PROMPTS[0]), TOKENS)
    assert len([piece for piece in together[0] if piece.tokens]) == TOKENS


def test_who_leaves_makes_room(address: str, written: Written) -> None:
    with (
        LanguageClient(address, tiny.NAME, seconds=300) as client,
        closing(client.stream(ids=[7], max_tokens=LENGTH - 1, ignore_eos=True, piece_seconds=0)) as answer,
    ):
        assert next(answer).tokens
    asked = {"ids": PROMPTS[0], "max_tokens": TOKENS, "ignore_eos": True}
    for count in (4, 5):  # one less than run and wait, since who left may still run; then as many
        with ThreadPoolExecutor(count) as pool:
            assert [tokens(one) for one in pool.map(lambda _: pieces(address, **asked), range(count))] == [written.expected[0]] * count


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ids": [5] * LENGTH}, rf"the prompt has {LENGTH} tokens; {LENGTH - 1} are allowed"),
        ({"ids": [5, WORDS]}, rf"INPUT_IDS: {WORDS} given; 0 to {WORDS - 1} is allowed"),
        ({"text": "w5", "beams": 2, "stream": False}, "does not search with beams"),
    ],
)
def test_what_is_wrong_is_one_clear_error(address: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        pieces(address, **asked)


def test_an_input_that_there_is_not_is_refused_by_the_server(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.client.DATATYPES, "COLOUR", "TYPE_INT32")
    with pytest.raises(RequestError, match="COLOUR"):
        pieces(address, ids=[5], colour=3)
