"""Whole files of GGUF, read back by the package `gguf`: names, order of rows, numbers, tokenizer, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file

from export.folders.source import PLACE, Source
from export.folders.table import FORMATS
from export.gguf import write as module
from export.gguf.write import GgufFile, write_gguf
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from foundation.models.own_shape import SHAPE_KEY
from tests.export.gguf import gguf_checkpoints as given


def written(folder: Path, out: Path, **settings: Any) -> tuple[GgufFile, GGUFReader]:
    found = write_gguf(Checkpoint(folder), out / "model.gguf", **settings)
    return found, GGUFReader(out / "model.gguf")


def tensors(reader: GGUFReader) -> dict[str, np.ndarray]:
    shapes = {one.name: [int(size) for size in reversed(one.shape)] for one in reader.tensors}
    return {one.name: dequantize(one.data, one.tensor_type).reshape(shapes[one.name]) for one in reader.tensors}


def values(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp turns them: a loop over heads and dimensions."""
    size = len(weight) // heads
    rows = [weight[head * size + half * (size // 2) + pair] for head in range(heads) for pair in range(size // 2) for half in (0, 1)]
    return np.stack(rows)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_float_decoder_is_there_tensor_by_tensor(kind: str, tmp_path: Path) -> None:
    folder = given.decoder(kind)
    _, reader = written(folder, tmp_path, floats="F32")
    found, stored = tensors(reader), {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    heads = {"q_proj": 4, "k_proj": 2}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    assert len(found) == len(stored)
    for name, tensor in stored.items():
        layer, _, parameter = name.rpartition(".")
        pieces = layer.split(".", 3)
        place = whole.get(layer) or f"blk.{pieces[2]}.{parts[pieces[3]]}"
        last = layer.rpartition(".")[2]
        expected = turned(tensor, heads[last]) if last in heads and kind in ("llama", "mistral") else tensor
        assert np.array_equal(found[f"{place}.{parameter}"], expected), name


def test_a_stored_head_that_is_tied_is_no_tensor_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    shutil.copytree(given.decoder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    _, reader = written(folder, tmp_path)
    names = {one.name for one in reader.tensors}
    assert "token_embd.weight" in names
    assert "output.weight" not in names


def test_the_numbers_of_a_decoder(tmp_path: Path) -> None:
    _, reader = written(given.decoder("llama"), tmp_path, name="tiny")
    found = values(reader)
    expected = {
        "general.architecture": "llama", "general.name": "tiny", "general.file_type": 1, "llama.context_length": 64, "llama.block_count": 2,
        "llama.embedding_length": 64, "llama.feed_forward_length": 96, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16, "llama.rope.dimension_count": 16, "llama.rope.freq_base": 10000.0, "llama.vocab_size": 300,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.chat_template"] == given.CHAT


def test_frequencies_of_llama_3_are_divided_as_transformers_scales_them(tmp_path: Path) -> None:
    _, reader = written(given.decoder("llama3"), tmp_path)
    found = tensors(reader)
    config = given.CONFIGS["llama3"]()
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / found["rope_freqs.weight"], rotary.inv_freq.numpy(), rtol=1e-5)
    assert found["rope_freqs.weight"].max() > 1
    assert "output.weight" not in found  # the head is tied to the embeddings


@pytest.mark.parametrize(("scheme", "kind", "number"), [("w8a8", "Q8_0", 7), ("w4a16", "Q4_0", 2), ("zero points", "Q4_1", 3)])
def test_a_quantized_decoder_holds_the_integers_of_the_run(scheme: str, kind: str, number: int, tmp_path: Path) -> None:
    folder = given.decoder("llama", scheme, tables=True)
    made, reader = written(folder, tmp_path)
    assert made.kind == kind
    assert values(reader)["general.file_type"] == number
    assert {one.source for one in made.of("rounded")} == set()
    assert {one.kind for one in made.of("codes") if one.name.startswith("blk.")} == {kind}
    assert {one.name: one.kind for one in made.of("codes") if not one.name.startswith("blk.")} == {
        "token_embd.weight": "Q8_0", "output.weight": "Q8_0",
    }  # fmt: skip
    found, stored = tensors(reader), load_file(folder / "model.safetensors")
    for one in made.of("codes"):
        expected = stored[one.source].numpy()
        heads = 4 if "q_proj" in one.source else 2 if "k_proj" in one.source else 0
        expected = turned(expected, heads) if heads else expected
        assert np.abs(found[one.name] - expected).max() <= 2**-10 * np.abs(expected).max()
        assert one.largest_change <= 2**-11
    taken = len(made.of("codes"))
    assert f"{taken} matrices" in made.remarks[0]


@pytest.mark.parametrize(("kind", "expected", "number"), [("llama", "Q4_1", 3), ("wide llama", "Q4_K", 14)])
def test_the_numbers_of_k_quants_are_those_of_the_checkpoint(kind: str, expected: str, number: int, tmp_path: Path) -> None:
    folder = given.decoder(kind, "k_quant")
    made, reader = written(folder, tmp_path)
    assert made.kind == expected
    assert values(reader)["general.file_type"] == number
    assert len(made.of("codes")) == 14
    found, stored = tensors(reader), load_file(folder / "model.safetensors")
    for one in made.of("codes"):
        weight = stored[one.source].numpy()
        heads = 4 if "q_proj" in one.source else 2 if "k_proj" in one.source else 0
        assert np.array_equal(found[one.name], turned(weight, heads) if heads else weight)
    assert "0 of" in made.remarks[1]


def test_groups_of_sixteen_are_rounded_again_and_reported(tmp_path: Path) -> None:
    made, _ = written(given.decoder("llama", "w4a16", group=16), tmp_path)
    assert made.kind == "Q8_0"
    assert len(made.of("rounded")) == 14
    assert any("rounded again" in line and "groups of 16" in line for line in made.remarks)


@pytest.mark.parametrize(("pooling", "number"), [("mean", 1), ("cls", 2)])
def test_an_embedder(pooling: str, number: int, tmp_path: Path) -> None:
    folder = given.embedder("w8a16", pooling)
    made, reader = written(folder, tmp_path)
    fields, found = values(reader), tensors(reader)
    expected = {
        "general.architecture": "bert", "bert.pooling_type": number, "bert.attention.causal": False, "bert.context_length": 40,
        "tokenizer.ggml.token_type_count": 2, "tokenizer.ggml.model": "bert", "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3, "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 1,
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert fields["bert.attention.layer_norm_epsilon"] == pytest.approx(1e-12)
    stored = load_file(folder / "model.safetensors")
    for name, source in {
        "blk.1.attn_q.weight": "encoder.layer.1.attention.self.query.weight",
        "blk.0.attn_output_norm.bias": "encoder.layer.0.attention.output.LayerNorm.bias",
        "blk.0.ffn_down.weight": "encoder.layer.0.output.dense.weight",
        "blk.1.layer_output_norm.weight": "encoder.layer.1.output.LayerNorm.weight",
        "position_embd.weight": "embeddings.position_embeddings.weight",
        "token_types.weight": "embeddings.token_type_embeddings.weight",
        "token_embd_norm.weight": "embeddings.LayerNorm.weight",
    }.items():
        np.testing.assert_allclose(found[name], stored[source].numpy(), atol=2**-10 * float(stored[source].abs().max()))
    assert not any("pooler" in name for name in found)
    assert any("length" in note for note in made.notes)


def test_what_llama_cpp_does_not_compute_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(source: Path, **settings: object) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        return folder

    llama, bert = given.decoder("llama"), given.embedder()
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    for folder, part in (
        (changed(llama, hidden_act="gelu"), "hidden_act gelu"),
        (changed(llama, rope_parameters=yarn), "RoPE scaling yarn"),
        (changed(llama, architectures=["LlamaForSequenceClassification"]), "only language models"),
        (changed(given.decoder("mistral"), sliding_window=8), "sliding window"),
        (changed(bert, sentence_embedding=None), "only text embedding models"),
        (changed(given.embedder(pooling="weighted")), "pooling weighted"),
        (changed(bert, hidden_act="relu"), "hidden_act relu"),
    ):
        with pytest.raises(InputError) as caught:
            write_gguf(Checkpoint(folder), tmp_path / "model.gguf")
        (problem,) = caught.value.problems
        assert part in problem.given
    assert SHAPE_KEY == "compress_architecture"
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"compress-transformers\[gguf\]"):
        write_gguf(Checkpoint(llama), tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "extra"
    shutil.copytree(given.decoder("llama"), folder)
    save_file({**load_file(folder / "model.safetensors"), "model.layers.0.extra.weight": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(InputError) as caught:
        write_gguf(Checkpoint(folder), tmp_path / "model.gguf")
    assert "model.layers.0.extra.weight" in caught.value.problems[0].given


@pytest.mark.parametrize(("folder", "task", "name"), [("w4a16", "text-generation", "Q4_0"), ("", "sentence-embedding", "F16")])
def test_a_published_folder_holds_one_file_named_by_its_format(folder: str, task: str, name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(given.decoder("llama", folder, tables=True) if folder else given.embedder())
    found = FORMATS["gguf"].write(Source("quantize", checkpoint, task, None, ()), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [f"model-{name}.gguf"]
    assert values(GGUFReader(tmp_path / f"model-{name}.gguf"))["general.name"] == "quantize"
    assert all(f"{PLACE}/model-{name}.gguf" in snippet.code for snippet in found.snippets)
    compile(found.snippets[0].code, "snippet", "exec")
    assert not found.as_torch
    assert len(found.remarks) >= 1
