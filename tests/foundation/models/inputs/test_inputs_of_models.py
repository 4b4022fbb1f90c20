"""What models read of a text is what Transformers gives them: logits equal those of its pipeline, one row at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openvino
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, pipeline

from export.graph.onnx import export_float
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig, most_tokens
from foundation.models.folder import Checkpoint
from foundation.models.importing import import_model
from foundation.models.library import quiet

pytestmark = pytest.mark.whole

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 300}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 300}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 300, "max_position_embeddings": 40, "pad_index": 1, "asm": False}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "openai-gpt": GPT,
    "ctrl": {**GPT, "dff": 48},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "num_heads": 4,
        "vocab_size": 300,
        "max_position_embeddings": 40,
    },
    "xlm": XLM,
    "flaubert": XLM,
    "bert": {**SIZES, "max_position_embeddings": 40},
    "roberta": {**SIZES, "max_position_embeddings": 42},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": 300},
    "funnel": {"d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 48, "vocab_size": 300},
}
TEXTS = ["a", "good film", "what a very long and dull film", "bad", "b" * 20]
PAIRS = [("a", "bcd"), ("good film", "bad"), ("what", "a very long and dull film"), ("x", "y"), ("b" * 9, "c")]
START, PAD, END = 0, 1, 2


def tokenizer(special: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(["<s>", "<pad>", "</s>", *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if special:
        made.post_processor = processors.BertProcessing(("</s>", END), ("<s>", START))
    return made


def write(folder: Path, kind: str, tokenizer_class: str = "GPT2Tokenizer", special: bool = False, **settings: Any) -> Path:
    """Writes a classifier of random weights, large enough for logits of size, and a tokenizer."""
    torch.manual_seed(0)
    settings = {"pad_token_id": PAD, **settings}
    config = AutoConfig.for_model(kind, **{**MODELS[kind], **settings, "id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}})
    with quiet():
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)
        model.save_pretrained(folder)
    tokenizer(special).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class, **names}))
    return folder


def ours(source: Path, out: Path, rows: list[Any]) -> np.ndarray:
    """Returns the logits of an imported model, all rows in one batch."""
    out.mkdir()
    import_model(ModelConfig(path=str(source), task="text-classification"), ("no", "yes"), 0, out)
    prepared = Checkpoint(out).preprocessor("text-classification", 32, Target(sequence_lengths=[32]))
    return np.asarray(predict(load(out), prepared, rows, len(rows)))


def theirs(source: Path, rows: list[Any]) -> np.ndarray:
    """Returns the logits of the pipeline of Transformers, one row at a time."""
    with quiet():
        pipe = pipeline("text-classification", model=str(source), device="cpu", function_to_apply="none", top_k=None)
        found = [pipe({"text": row[0], "text_pair": row[1]} if isinstance(row, tuple) else row) for row in rows]
    answers = [answer[0] if isinstance(answer[0], list) else answer for answer in found]
    return np.array([[entry["score"] for entry in sorted(answer, key=lambda entry: entry["label"])] for answer in answers])


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", sorted(MODELS.keys() - {"xlnet"}))
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    pairs = kind in ("bert", "funnel")
    source = write(tmp_path / "source", kind, "BertTokenizer" if pairs else "GPT2Tokenizer", special=pairs)
    rows: list[Any] = PAIRS if pairs else TEXTS
    if pairs:  # a class that makes token types, but no tokens of its own
        settings = json.loads((source / "tokenizer_config.json").read_text())
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        (source / "tokenizer_config.json").write_text(
            json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs})
        )
    expected = theirs(source, rows)
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(ours(source, tmp_path / "out", rows), expected, atol=2e-4)
    found = Checkpoint(tmp_path / "out").preprocessor("text-classification", 32, Target(sequence_lengths=[32])).input_names
    assert ("token_type_ids" in found) is pairs


def test_xlnet_reads_token_types_and_that_it_answers_in_the_padding_is_noted(tmp_path: Path) -> None:
    source, out, lines = write(tmp_path / "source", "xlnet", "XLNetTokenizer"), tmp_path / "out", list[str]()
    out.mkdir()
    import_model(ModelConfig(path=str(source), task="text-classification"), ("no", "yes"), 0, out, log=lines.append)
    found = Checkpoint(out).preprocessor("text-classification", 32, Target(sequence_lengths=[32])).input_names
    assert "token_type_ids" in found
    assert any("padded on the right" in line for line in lines)


@pytest.mark.parametrize("pad_token_id", [5, None, -1])
def test_rows_are_padded_as_the_model_reads_padding(pad_token_id: int | None, tmp_path: Path) -> None:
    source = write(tmp_path / "source", "gpt2", pad_token_id=pad_token_id)
    np.testing.assert_allclose(ours(source, tmp_path / "out", TEXTS), theirs(source, TEXTS), atol=2e-4)
    config, settings = (json.loads((tmp_path / "out" / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    told = tokenizer(special=False).token_to_id(settings["pad_token"])
    assert config["pad_token_id"] == told == (5 if pad_token_id == 5 else PAD)


def test_without_a_padding_token_the_advice_works(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "gpt2", pad_token_id=None)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"pad_token in tokenizer_config\.json .* no text ends"):
        ours(source, tmp_path / "first", TEXTS)
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "</s>"}))
    np.testing.assert_allclose(ours(source, tmp_path / "second", TEXTS), theirs(source, TEXTS), atol=2e-4)


def test_a_padding_token_that_ends_texts_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "gpt2", special=True, pad_token_id=None)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "</s>"}))
    with pytest.raises(InputError, match=r"'</s>' .*; set pad_token in tokenizer_config\.json to another"):
        ours(source, tmp_path / "out", TEXTS)


@pytest.mark.slow
def test_a_text_without_a_token_is_one_real_token_in_every_engine(tmp_path: Path) -> None:
    rows = ["", "good film"]
    source, out = write(tmp_path / "source", "bert", "PreTrainedTokenizerFast"), tmp_path / "out"
    logits = ours(source, out, rows)
    prepared = Checkpoint(out).preprocessor("text-classification", 16, Target(sequence_lengths=[8, 16]))
    features = prepared.encode(rows)
    assert features["attention_mask"].sum(axis=1).tolist() == [1, len("good film")]
    assert prepared.encode([""], 0)["input_ids"].tolist() == [[PAD]]
    np.testing.assert_allclose(predict(load(out), prepared, [""], 1), logits[:1], atol=1e-5)  # whatever it is padded to
    graph = str(export_float(Checkpoint(out), prepared, tmp_path / "model.onnx"))
    in_onnxruntime = onnxruntime.InferenceSession(graph).run(None, dict(features))[0]
    in_openvino = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(features)[0]
    np.testing.assert_allclose(in_onnxruntime, logits, atol=1e-4)
    np.testing.assert_allclose(in_openvino, logits, atol=1e-4)


SMALL = {**SIZES, "hidden_size": 16, "max_position_embeddings": 20}
TABLES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("roberta", "camembert", "xlm-roberta", "roberta-prelayernorm", "data2vec-text", "bert", "electra", "mpnet"), SMALL),
    "xlm-roberta-xl": SMALL,
    "ibert": SMALL,
    "xmod": {**SMALL, "languages": ["en_XX"], "default_language": "en_XX"},
    "esm": {**SMALL, "position_embedding_type": "absolute", "mask_token_id": 3},
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 4, "hidden_dim": 16, "vocab_size": 300, "max_position_embeddings": 20},
}


@pytest.mark.first(1)
@pytest.mark.parametrize("pad_token_id", [1, 3])
@pytest.mark.parametrize("kind", TABLES)
def test_the_longest_text_is_the_one_that_the_model_reads(kind: str, pad_token_id: int) -> None:
    config = AutoConfig.for_model(kind, **{**TABLES[kind], "pad_token_id": pad_token_id})
    with quiet():
        model = AutoModel.from_config(config).eval()
    longest = most_tokens(config)
    assert longest is not None
    ids = torch.full((1, longest + 1), 7)
    with torch.no_grad():
        model(input_ids=ids[:, :longest])
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            model(input_ids=ids)
