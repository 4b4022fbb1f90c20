"""A language model in ONNX Runtime at the real server, by the client of OpenAI: what needs its logits. Needs the server environment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import openai
import pytest
import torch
from safetensors.numpy import save_file

from distill.labeller.api import ApiScorer
from distill.labeller.prompts import Query
from distill.labeller.scorer import Asked
from export.engines.onnxruntime_decoder import MODE, MODEL, properties
from foundation.artifacts.artifact import Artifact, write_json
from foundation.core.engines import served_on
from foundation.models.inputs.language import of_transformers
from foundation.standalone.language_text import SETTINGS, TOKENIZER
from tests.export.engines.test_onnxruntime_decoder import folder
from tests.export.generation.tiny_decoders import decoder
from tests.triton_repo.generation.tiny_language import CHAT, EOS, tokenizer
from triton_repo import environment, layout
from triton_repo.generation.layout import write_language_repository
from triton_repo.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "llama-fp32"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
RULE = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
"""A short one: each letter is a token."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    root = tmp_path_factory.mktemp("language")
    place = root / "export" / NAME
    shutil.copytree(folder("llama"), place / "onnx")
    words = tokenizer()
    words.chat_template = RULE + CHAT
    words.backend_tokenizer.save(str(place / "onnx" / TOKENIZER))
    write_json(place / "onnx" / SETTINGS, asdict(of_transformers(words).settings))
    (place / "onnx" / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    save_file({"prompts": np.zeros((1, 1), np.int32), "tokens": np.zeros((1, 1), np.int32)}, place / "answers.safetensors")
    entry = {
        "engine": "onnxruntime_decoder",
        "mode": MODE,
        "float_precision": "fp32",
        "runnable": True,
        "file": f"{NAME}/onnx/{MODEL}",
        "properties": properties(1),
        "generation": {"file": f"{NAME}/answers.safetensors"},
    }
    build = {"variant": "llama", "precision": "fp32", "folder": NAME, "onnx": "model.onnx", "engines": [entry]}
    (root / "export" / "export.json").write_text(json.dumps({"schema": 1, "builds": [build]}))
    models = layout.served_models(Artifact(root / "export", {"digest": "0"}), served_on("cpu", generates=True))
    write_language_repository(root / "repository", models, batch_sizes=(1, 8))
    with Service(root / "repository", environment.check(), root / "log") as running:
        yield openai.OpenAI(base_url=f"http://{running.http_address}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_are_those_of_transformers(client: openai.OpenAI, stream: bool) -> None:
    prompt = [5, 6, 7]
    asked: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "max_tokens": 12, "logprobs": 3, "stream": stream}
    answer = client.completions.create(model=NAME, prompt=prompt, **asked)
    parts = [part.choices[0] for part in (list(answer) if stream else [answer])]
    found = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
    best = [max(one.values()) for part in parts if part.logprobs for one in part.logprobs.top_logprobs]
    ids = list(prompt)
    for value, largest in zip(found, best, strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(decoder("llama")(torch.tensor([ids])).logits[0, -1].float(), -1)
        assert value == largest == pytest.approx(float(expected.max()), abs=2e-4)
        ids.append(int(expected.argmax()))
    assert len(found) == 12
    assert "".join(part.text for part in parts) == tokenizer().decode(ids[3:], skip_special_tokens=True)


def test_several_answers_are_those_of_their_seeds(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 16, "temperature": 1.5}
    answer = client.chat.completions.create(n=3, seed=4, **asked)
    alone = [client.chat.completions.create(seed=seed, **asked) for seed in (4, 5, 6)]
    assert [one.message.content for one in answer.choices] == [one.choices[0].message.content for one in alone]
    assert len({one.message.content for one in answer.choices}) == 3
    assert answer.usage is not None
    assert [one.usage.prompt_tokens for one in alone if one.usage] == [answer.usage.prompt_tokens] * 3
    pieces = list(client.chat.completions.create(n=3, seed=4, stream=True, **asked))
    texts = ["".join(one.choices[0].delta.content or "" for one in pieces if one.choices[0].index == index) for index in range(3)]
    assert texts == [one.message.content for one in answer.choices]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls_fit_their_schema(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 100, "tools": TOOLS, "tool_choice": choice}
    answer = client.chat.completions.create(parallel_tool_calls=False, temperature=1.0, stream=stream, **asked)
    choices = [one.choices[0] for one in answer] if stream else answer.choices
    (call,) = [call for one in choices for call in (one.delta if stream else one.message).tool_calls or ()]
    assert choices[-1].finish_reason == "tool_calls"
    assert call.function.name == "add"
    assert 0 <= json.loads(call.function.arguments)["a"] <= 99


def test_the_template_writes_the_functions(client: openai.OpenAI) -> None:
    without, given = (
        client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=2, **more) for more in ({}, {"tools": TOOLS})
    )
    assert without.usage is not None
    assert given.usage is not None
    assert given.usage.prompt_tokens - without.usage.prompt_tokens == len("add")


def test_it_labels_texts_by_the_probabilities_of_words(client: openai.OpenAI) -> None:
    def listed(text: str) -> dict[str, float]:
        """Letters among the five most likely tokens after a text."""
        with torch.no_grad():
            log_p = decoder("llama")(torch.tensor([tokenizer()(text)["input_ids"]])).logits[0, -1].float().log_softmax(-1)
        found = {tokenizer().decode([int(token)]): float(value) for value, token in zip(*log_p.topk(5), strict=True)}
        return {token: value for token, value in found.items() if len(token) == 1 and token.isalnum()}

    prompt, first = next((text, listed(text)) for text in map(str, range(100)) if len(listed(text)) >= 2)
    letter, other = list(first)[:2]
    following = next(iter(listed(prompt + letter)), None)
    words = (other, letter + following) if following else (other, letter)
    expected = [first[other], first[letter] + (listed(prompt + letter)[following] if following else 0.0)]
    scorer = ApiScorer(str(client.base_url), NAME, None, "teacher")
    [(indices, answer)] = scorer.scores([Asked(Query(prompt, ""), words)])
    assert indices == [0]
    np.testing.assert_allclose(answer[0, 0], expected, atol=5e-4)
    assert answer[0, 1].tolist() == [1, len(words[1])]
