"""Log-probabilities of answers: those of Transformers' logits, token by token, whatever else is asked for and whoever runs beside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from export.engines.onnxruntime_decoder import MODEL, properties
from foundation.models.inputs.language import of_transformers
from foundation.standalone.encoder_decoder import EncoderDecoder
from foundation.standalone.language_text import LanguageText, TextSettings
from foundation.standalone.onnx_decoder import OnnxDecoder
from tests.export.engines.test_onnxruntime_decoder import folder
from tests.export.generation import tiny_encoder_decoders as t5
from tests.export.generation.tiny_decoders import VOCABULARY, decoder
from tests.triton_repo.generation.test_engine import Client
from tests.triton_repo.generation.tiny_language import EOS, prompts, tokenizer
from triton_repo.generation.served.answer import LENGTH, STOP, Answer
from triton_repo.generation.served.batched import Batched
from triton_repo.generation.served.engine import Engine
from triton_repo.generation.served.grouped import Grouped, Special
from triton_repo.generation.served.logprobs import LEAST, Spelling, likeliest, log_softmax
from triton_repo.generation.served.request import FIELDS, REGEX, Limits, Refused, Request, Wanted, read
from triton_repo.generation.served.structures import Structures

pytestmark = pytest.mark.whole

MOST = 4
LIMITS = Limits(context=64, vocabulary=VOCABULARY, seconds=30.0, chat=False, beams=True, scored=True)
WORDS = {1: "one two", 2: " three", 3: " four", 4: ""}
FLAT_V = np.zeros(8, np.float32)


@cache
def text() -> LanguageText:
    """Tokens of single bytes, so that answers break letters apart."""
    return LanguageText(of_transformers(tokenizer()).tokenizer, TextSettings())


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    engine.start()
    yield engine
    engine.close()


def batched(ends: Sequence[int] = ()) -> Batched:
    return Batched(lambda: OnnxDecoder(Path(folder("llama"), MODEL), properties(1)), ends, 4, 8)


def submit(engine: Engine, prompt: np.ndarray, most: int | None = MOST, stop: tuple[str, ...] = (), **given: Any) -> Client:
    values = {field.name: field.default for field in FIELDS} | {"MAX_TOKENS": 12, "TIMEOUT_SECONDS": 60.0, "LOGPROBS": most} | given
    structure = values.pop("structure", None)
    listed, client = None if most is None else Spelling(text()).begin(most), Client()
    engine.submit(Answer(Request(prompt.astype(np.int64), values, stop, ()), client, text().decode, 0, structure, listed))
    return client


def tokens(client: Client) -> list[int]:
    assert client.over.wait(30)
    assert client.refused is None
    return [token for piece in client.pieces for token in piece["TOKENS"]]


def listed(client: Client) -> list[dict[str, Any]]:
    return [one for piece in client.pieces for one in json.loads(piece["LOGPROBS"])]


def in_transformers(prompt: np.ndarray, answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities in the place of each token of an answer, [n, V]: the model reads the text anew for each."""
    rows = []
    with torch.no_grad():
        for count in range(len(answer)):
            ids = torch.tensor([[*prompt.tolist(), *answer[:count]]])
            rows.append(decoder("llama")(ids).logits[0, -1].float())
    return torch.log_softmax(torch.stack(rows), -1)


def check(client: Client, expected_nV: torch.Tensor, answer: Sequence[int]) -> None:
    found = listed(client)
    assert [one["id"] for one in found] == list(answer)
    for one, row_V in zip(found, expected_nV, strict=True):
        assert one["logprob"] == pytest.approx(float(row_V[one["id"]]), abs=2e-4)
        best = torch.topk(row_V, MOST)
        assert [other["id"] for other in one["top_logprobs"]] == best.indices.tolist()
        assert [other["logprob"] for other in one["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=2e-4)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"STREAM": False},
        {"PIECE_SECONDS": 0.0},
        {"REPETITION_PENALTY": 3.0, "PRESENCE_PENALTY": 2.0},
        {"TEMPERATURE": 3.0, "SEED": 5, "TOP_K": 40},
    ],
)
def test_they_are_those_of_the_logits_of_transformers(given: dict[str, Any]) -> None:
    (prompt,) = prompts((9,), seed=31)
    with running(batched()) as engine:
        client = submit(engine, prompt, **given)
        answer = tokens(client)
    assert len(answer) == 12
    check(client, in_transformers(prompt, answer), answer)


def test_a_structure_does_not_change_them() -> None:
    (prompt,) = prompts((9,), seed=32)
    ends = (EOS,)
    structure = Structures(text(), VOCABULARY, ends).begin(Wanted(REGEX, "[a-f]{5}"))
    with running(batched(ends)) as engine:
        client = submit(engine, prompt, structure=structure)
        answer = tokens(client)
    check(client, in_transformers(prompt, answer), answer)


def test_neighbours_are_not_changed_and_get_no_list() -> None:
    asked = prompts((9, 30, 4), seed=33)
    with running(batched()) as engine:
        alone = [tokens(submit(engine, prompt, None)) for prompt in asked]
        clients = [submit(engine, prompt, most) for prompt, most in zip(asked, (None, MOST, None), strict=True)]
        assert [tokens(client) for client in clients] == alone
    check(clients[1], in_transformers(asked[1], alone[1]), alone[1])
    assert not any("LOGPROBS" in piece for client in (clients[0], clients[2]) for piece in client.pieces)


def test_an_encoder_decoder_gives_those_of_transformers() -> None:
    (source,) = t5.sources((9,), seed=34)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": "1"}
    special = Special(t5.START, t5.PAD, [])
    with running(Grouped(lambda: EncoderDecoder(t5.folder("t5"), settings, t5.PAD), special, 4, 8)) as engine:
        client = submit(engine, source, REPETITION_PENALTY=3.0)
        answer = tokens(client)
    with torch.no_grad():
        written = torch.tensor([[t5.START, *answer[:-1]]])
        logits = t5.encoder_decoder("t5")(input_ids=torch.tensor(source[None].astype(np.int64)), decoder_input_ids=written).logits
    check(client, torch.log_softmax(logits[0].float(), -1), answer)


def test_pieces_list_the_tokens_of_their_letters_and_bytes_make_the_text() -> None:
    with running(batched()) as engine:
        for prompt in prompts((9, 5, 7, 12), seed=35):
            client = submit(engine, prompt, 0, MAX_TOKENS=40, PIECE_SECONDS=0.0)
            answer = tokens(client)
            whole, places = "", []
            for piece in client.pieces:
                entries = json.loads(piece["LOGPROBS"])
                whole += piece["TEXT"]
                assert all(one["text_offset"] < len(whole) for one in entries) or "FINISH_REASON" in piece
                places += [one["text_offset"] for one in entries]
            found = listed(client)
            assert [one["id"] for one in found] == answer
            spelled = b"".join(bytes(one["bytes"]) for one in found if one["bytes"] is not None)
            assert spelled.decode("utf-8", "replace") == whole
            assert places == [len(text().decode(answer[:count]).rstrip("\ufffd")) for count in range(len(answer))]
            assert all(one["top_logprobs"] == [] for one in found)
            assert any(len(one["token"]) > 1 for one in found)  # half a letter, or a special token


def answered(steps: list[list[int]], reason: str | None = None, **inputs: Any) -> tuple[str, list[int], Client]:
    """Returns text and listed tokens of an answer of `WORDS`; token 4 is special."""
    given = {"INPUT_IDS": np.array([1]), "LOGPROBS": np.array([0]), "PIECE_SECONDS": np.array([0.0]), **inputs}
    client = Client()
    names = Tokenizer(models.WordLevel({"<unk>": 0, "one two": 1, " three": 2, " four": 3, "<end>": 4}, unk_token="<unk>"))
    names.add_special_tokens(["<end>"])
    request = read(given, LIMITS, text())
    spelling = Spelling(LanguageText(names, TextSettings()))
    one = Answer(request, client, lambda ids: "".join(WORDS[token] for token in ids), 0, None, spelling.begin(0))
    for number, step in enumerate(steps):
        if not one.ended:
            one.take(step, reason if number == len(steps) - 1 else None, FLAT_V)
    return "".join(piece["TEXT"] for piece in client.pieces), [entry["id"] for entry in listed(client)], client


def test_a_stop_text_cuts_the_list_where_it_cuts_the_text() -> None:
    stop = np.array([b"three"], np.object_)
    assert answered([[1], [2], [3]], STOP=stop)[:2] == ("one two ", [1, 2])  # a letter of the second token is in the text
    stop = np.array([b" three"], np.object_)
    assert answered([[1], [2], [3]], STOP=stop)[:2] == ("one two", [1])
    stop = np.array([b"two three"], np.object_)
    found, ids, client = answered([[1], [2], [3]], STOP=stop)
    assert (found, ids) == ("one ", [1])
    assert client.pieces[-1]["TOKENS"] == [2]


def test_letters_that_wait_for_a_stop_text_hold_their_tokens_back() -> None:
    stop = np.array([b" three five"], np.object_)
    found, ids, client = answered([[1], [2], [3]], LENGTH, STOP=stop)
    assert (found, ids) == ("one two three four", [1, 2, 3])
    assert [[one["id"] for one in json.loads(piece["LOGPROBS"])] for piece in client.pieces] == [[1], [], [2, 3]]


def test_an_end_token_is_not_listed_and_one_in_the_text_is() -> None:
    assert answered([[1], [4]], STOP)[:2] == ("one two", [1])
    assert answered([[1], [4]], STOP_TOKENS=np.array([4]))[:2] == ("one two", [1])
    assert answered([[1], [4], [2]], LENGTH)[:2] == ("one two three", [1, 4, 2])
    assert answered([[1], [4]], LENGTH)[:2] == ("one two", [1, 4])


BYTES = ["<0xE2>", "<0x82>", "<0xAC>"]
FALLBACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def spelling(vocabulary: Sequence[str], decoder: Any) -> tuple[Spelling, Tokenizer]:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoder
    made.add_special_tokens(["<end>"])
    return Spelling(LanguageText(made, TextSettings())), made


@pytest.mark.parametrize(
    ("decoder", "name", "first", "token", "spelled"),
    [
        (FALLBACK, "<0xE2>", False, "\\xe2", [0xE2]),
        (FALLBACK, "▁a", False, " a", [32, 97]),
        (FALLBACK, "▁a", True, "a", [97]),
        (FALLBACK, "<end>", False, "<end>", None),
        (decoders.Metaspace(), "▁é", False, " é", [32, 0xC3, 0xA9]),
        (decoders.ByteLevel(), "Ġa", True, " a", [32, 97]),
        (decoders.ByteLevel(), "âĤ", False, "\\xe2\\x82", [0xE2, 0x82]),
        (decoders.ByteLevel(), "日", False, "日", [0xE6, 0x97, 0xA5]),  # an added token: its letters stand for themselves
        (decoders.WordPiece(), "##ing", False, "ing", [105, 110, 103]),
        (decoders.WordPiece(), "play", False, " play", [32, 112, 108, 97, 121]),
        (decoders.WordPiece(), "play", True, "play", [112, 108, 97, 121]),
        (None, "play", False, " play", [32, 112, 108, 97, 121]),
    ],
)
def test_tokens_are_written_as_their_decoder_writes_them(
    decoder: Any, name: str, first: bool, token: str, spelled: list[int] | None
) -> None:
    made, names = spelling(["a", "▁a", "▁é", "Ġa", "âĤ", "日", "##ing", "play", *BYTES], decoder)
    assert made.entry(names.token_to_id(name), -1.0, first=first) == {
        "id": names.token_to_id(name),
        "token": token,
        "bytes": spelled,
        "logprob": -1.0,
    }


def test_a_letter_of_byte_tokens_is_put_together_from_their_bytes() -> None:
    made, names = spelling(["a", "▁a", *BYTES], FALLBACK)
    ids = [names.token_to_id(name) for name in ("▁a", *BYTES, "▁a")]
    entries = [made.entry(token, 0.0, first=not place) for place, token in enumerate(ids)]
    assert b"".join(bytes(one["bytes"]) for one in entries).decode() == "a\u20ac a" == names.decode(ids)


def test_a_token_without_a_name_and_a_probability_of_0_can_be_written() -> None:
    made, _ = spelling(["a"], decoders.ByteLevel())
    assert made.entry(99, -np.inf, first=False) == {"id": 99, "token": "", "bytes": None, "logprob": LEAST}


def test_equal_tokens_are_ranked_by_their_numbers() -> None:
    logprobs_V = np.array([-3, -1, -2, -1, -2, -1], np.float32)
    assert likeliest(logprobs_V, 2).tolist() == [1, 3]
    assert likeliest(logprobs_V, 4).tolist() == [1, 3, 5, 2]
    assert likeliest(logprobs_V, 0).tolist() == []
    assert likeliest(logprobs_V, 9).tolist() == [1, 3, 5, 2, 4, 0]


def test_logits_far_from_0_have_logarithms_and_those_that_are_no_numbers_end_the_answer() -> None:
    logits_V = np.array([1e30, -1e30, 1e30, -np.inf], np.float32)
    np.testing.assert_allclose(log_softmax(logits_V), [np.log(0.5), -2e30, np.log(0.5), -np.inf], rtol=1e-6)
    for wrong in ([np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]):
        with pytest.raises(ValueError, match="no numbers"):
            log_softmax(np.array(wrong, np.float32))


@pytest.mark.parametrize(
    ("scored", "inputs", "words"),
    [
        (False, {"LOGPROBS": np.array([0])}, "LOGPROBS: not offered by OpenVINO GenAI"),
        (True, {"LOGPROBS": np.array([21])}, "LOGPROBS: 21 given; 0 to 20 is allowed"),
        (True, {"LOGPROBS": np.array([1]), "BEAMS": np.array([2]), "STREAM": np.array([False])}, "LOGPROBS given with 2 beams"),
    ],
)
def test_wrong_requests_are_refused_by_name(scored: bool, inputs: dict[str, np.ndarray], words: str) -> None:
    limits = Limits(context=64, vocabulary=VOCABULARY, seconds=30.0, chat=False, beams=True, scored=scored)
    with pytest.raises(Refused, match=words):
        read({"INPUT_IDS": np.array([1]), **inputs}, limits, text())
