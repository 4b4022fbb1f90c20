"""Labels by entailment, against the pipeline of Transformers on the same model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, pipeline

from tests.docs.blocks import ROOT, blocks
from tests.export import sentiment

CLASSES = ("contradiction", "entailment", "neutral")


class Served:
    """A client whose server runs the model in torch."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def infer(self, name: str, inputs: list[Any]) -> Any:
        texts, pairs = ([text.decode() for text in strings(tensor)] for tensor in inputs)
        with torch.no_grad():
            logits = self.model(**self.tokenizer(texts, pairs, padding=True, return_tensors="pt")).logits.numpy()
        return SimpleNamespace(as_numpy={"LOGITS": logits}.get)


def strings(tensor: Any) -> list[bytes]:
    content, found = tensor._get_content(), []
    while content:
        size = int.from_bytes(content[:4], "little")
        found.append(content[4 : 4 + size])
        content = content[4 + size :]
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("entailment")
    words = [*sentiment.SPECIALS, *sentiment.WORDS, "this", "is", ".", "text", "about", "music", "plot", "food"]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(words)))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=3,
        id2label=dict(enumerate(CLASSES)), label2id={name: index for index, name in enumerate(CLASSES)}, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    return Served(BertForSequenceClassification(config).eval(), tokenizer)


def test_the_example_of_the_documentation_prints_the_scores_of_transformers(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tritonclient import grpc

    [example] = [block for block in blocks(ROOT / "docs/tutorials/multi-label.md") if block.runner == "tests/triton_repo/test_zero_shot.py"]
    monkeypatch.setattr(grpc, "InferenceServerClient", lambda address: served)
    exec(compile(example.body, str(example), "exec"), {})
    theirs = pipeline("zero-shot-classification", model=served.model, tokenizer=served.tokenizer)(
        "the plot was dull, but I love the music", ["music", "plot", "food"], multi_label=True, hypothesis_template="This text is about {}."
    )
    printed = [f"{label} {score:.3f}" for label, score in zip(theirs["labels"], theirs["scores"], strict=True)]
    assert capsys.readouterr().out.splitlines() == printed
    assert len({line.split()[1] for line in printed}) == 3
