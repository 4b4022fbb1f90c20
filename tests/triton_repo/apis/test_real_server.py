"""Clients of other servers at the real server: their answers are those of gRPC, and those of the engine. Needs the server environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

from tests.triton_repo import tiny_exports as tiny
from tests.triton_repo.generation import tiny_language
from tests.triton_repo.generation.served_language import PAGED, STATEFUL, language_server, pieces
from triton_repo import environment, layout
from triton_repo.service import Service

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with language_server(tmp_path_factory.mktemp("language")) as running:
        yield running


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("classifiers")
    for name, prepared, rows in (("text", tiny.text_preprocessor(), tiny.TEXTS), ("image", tiny.image_preprocessor(), tiny.IMAGES)):
        exported = tiny.export(root / name, prepared, rows, ((name, "fp32"),))
        layout.write_repository(root / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1, 8))
    with Service(root / "repository", environment.check(), root / "log") as running:
        yield running


@pytest.mark.parametrize("model", [PAGED, STATEFUL])
@pytest.mark.parametrize("stream", [True, False])
def test_completions_are_the_answers_over_grpc(language: Service, model: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"http://{language.http_address}/v1", api_key="none", max_retries=0)
    for prompt in tiny_language.prompts((3, 20)):
        told = pieces(language, model, ids=prompt, max_tokens=25, ignore_eos=True)
        answer = client.completions.create(
            model=model, prompt=[int(token) for token in prompt], max_tokens=25, stream=stream, extra_body={"ignore_eos": True}
        )
        parts = list(answer) if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == "".join(piece.text for piece in told)
        assert parts[-1].choices[0].finish_reason == "length"
        if not stream:
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 25)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"logprobs": True}, "LOGPROBS: not offered by OpenVINO GenAI"), ({"tools": [TOOL]}, "TOOLS: the chat template of this model")],
)
def test_what_openvino_genai_and_a_template_cannot_do_is_refused(language: Service, given: Any, named: str) -> None:
    client = openai.OpenAI(base_url=f"http://{language.http_address}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=named):
        client.chat.completions.create(model=PAGED, messages=[{"role": "user", "content": "a"}], **given)


def test_labels_are_those_of_the_engine(classifiers: Service) -> None:
    for model, rows, prepared in (
        ("text-fp32", tiny.TEXTS, tiny.text_preprocessor()),
        ("image-fp32", tiny.IMAGES, tiny.image_preprocessor()),
    ):
        client = InferenceClient(model=f"http://{classifiers.http_address}/models/{model}", token="none")
        for row, logits in zip(rows, tiny.expected(prepared, rows), strict=True):
            found = client.text_classification(row) if isinstance(row, str) else client.image_classification(row)
            powers = np.exp(logits - logits.max())
            expected = dict(zip(tiny.LABELS, powers / powers.sum(), strict=True))
            assert {one.label: one.score for one in found} == pytest.approx(expected, rel=1e-5)
            assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
