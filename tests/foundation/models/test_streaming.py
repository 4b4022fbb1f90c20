"""Language models run unit by unit from their files: the logits of the whole model, whatever the architecture, the type and the shards.

python -m pytest tests/foundation/models/test_streaming.py
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.measure import metrics, predictions
from foundation.models import streaming
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.streaming import HIDDEN, StreamedModel, meta_model, structure_problem
from foundation.standalone.preprocess import Preprocessor
from tests import tiny_language_models as tiny


def processor_of(folder: Path) -> Preprocessor:
    return Checkpoint(folder).preprocessor("text-generation", tiny.LENGTH, Target(sequence_lengths=(8, tiny.LENGTH)))


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_logits_are_those_of_the_whole_model(kind: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", kind, dtype, tie_word_embeddings=tied)
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = StreamedModel(folder)
    assert len(model) == 3
    assert all(parameter.is_meta for parameter in model.shape.parameters())  # the layers stay in their files
    ids = torch.from_numpy(np.stack(tiny.blocks(3, 5).rows)).long()
    with torch.inference_mode():
        expected, found = forward(load(folder), {"input_ids": ids}), model.forward({"input_ids": ids})
    assert float(expected.abs().max()) > 0.5
    assert torch.equal(found, expected)


def test_rows_in_batches_give_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two lengths, batches of two, parts of a few outputs, hidden states in a file."""
    folder, rows = tiny.write(tmp_path / "model", "qwen2", torch.bfloat16), tiny.data().evaluation.rows
    monkeypatch.setattr(streaming, "BATCH_TOKENS", 2 * tiny.LENGTH)
    monkeypatch.setattr(streaming, "available_bytes", lambda: 0)
    monkeypatch.setattr("foundation.models.layers.stored_linear.StoredLinear.parts.__defaults__", (32 * 4 * 7,))
    whole = predictions.predict(load(folder), processor_of(folder), rows, 32)
    found = predictions.predict_streamed(folder, processor_of(folder), rows, 32, tmp_path / "scratch")
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
    assert list((tmp_path / "scratch").iterdir()) == []  # gone with the process
    labels = tiny.data().evaluation.labels
    perplexity = [metrics.metrics("text-generation", answers, labels)["perplexity"] for answers in (whole, found)]
    assert perplexity[1] == pytest.approx(perplexity[0], rel=1e-6)


def test_hidden_states_are_kept_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StreamedModel(tiny.write(tmp_path / "model", "llama"))
    kept = {}
    for available in (0, 2**40):
        monkeypatch.setattr(streaming, "available_bytes", lambda size=available: size)
        batches, size = model.batches(processor_of(tmp_path / "model"), tiny.blocks(5, 0).rows, tmp_path / "scratch")
        assert size == 5 * tiny.LENGTH * 32 * 4
        kept[available] = torch.cat([batch.hidden for batch in batches])
    assert torch.equal(kept[0], kept[2**40])
    assert kept[0].shape == (5, tiny.LENGTH, 32)
    embedded = load(tmp_path / "model").get_input_embeddings()(torch.from_numpy(np.stack(tiny.blocks(5, 0).rows)).long())
    assert torch.equal(kept[0], embedded)


def test_a_layer_takes_what_the_model_gives_it(tmp_path: Path) -> None:
    """Mask and positions of each layer, sliding or not, are the ones that its forward is called with in the whole model."""
    folder = tiny.write(tmp_path / "model", "qwen2")
    whole, model = load(folder), StreamedModel(folder)
    ids = {"input_ids": torch.from_numpy(np.stack(tiny.blocks(2, 5).rows)).long()}
    given = []
    for layer in whole.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    with torch.inference_mode():
        whole(**ids, use_cache=False)
        for index, (_, expected) in enumerate(given):
            args, found = model.arguments(index, ids)
            assert args == ()
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, msg=name)
    masks = [kwargs["attention_mask"] for _, kwargs in given]
    assert masks[0] is None or not torch.equal(masks[0], masks[2])


def test_units_as_they_are_stored(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", "llama", torch.bfloat16, tie_word_embeddings=False)
    units = StreamedModel(folder).unit_bytes()
    assert units["model.embed_tokens.weight"] == units["lm_head.weight"] == 2 * 64 * 32
    assert units["model.layers.1"] == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32)
    stored = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
    assert sum(units.values()) == sum(tensor.numel() * tensor.element_size() for tensor in stored)


def test_a_buffer_and_a_float_layer_are_filled(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", "gpt2", torch.bfloat16)
    model, whole = StreamedModel(folder), load(folder)
    with model.layer(1) as layer:
        assert model.shape.get_submodule("transformer.h.1") is layer
        assert not any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
        assert all(not module.training for module in layer.modules())
        linear = layer.get_submodule("mlp.c_fc")
        assert torch.equal(linear.rows(0, linear.out_features), whole.transformer.h[1].mlp.c_fc.weight)
        assert linear.weight.dtype == torch.bfloat16
        assert layer.ln_1.weight.dtype == torch.float32
    assert all(parameter.is_meta for parameter in model.shape.parameters())


def edited(folder: Path, change: object) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("kind", "change", "name"),
    [
        ("llama", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        ("llama", lambda t: t.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight"),
        ("llama", lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(32, 48)}), "model.layers.0.mlp.up_proj.weight"),
        ("gpt2", lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": torch.ones(128, 32)}), "transformer.h.0.mlp.c_fc.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named(kind: str, change: object, name: str, tmp_path: Path) -> None:
    folder = edited(tiny.write(tmp_path / "model", kind, shard="1GB"), change)
    with pytest.raises(InputError, match=f"missing or have another shape: {name}; write it again"):
        StreamedModel(folder)


def test_other_structures_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    experts, _ = meta_model(transformers.MixtralConfig(**sizes, num_key_value_heads=2))
    assert "has 3 dimensions" in str(structure_problem(experts))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])

    assert structure_problem(Two()) == "it has 2 lists of layers (encoder, decoder); streaming needs exactly one list of decoder layers"
    assert str(structure_problem(nn.Linear(2, 2))).startswith("it has 0 lists of layers (none)")


def test_large_is_a_matter_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write(tmp_path / "model", "llama", torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in load(folder).parameters())
    for available, large in ((8 * parameters - 1, True), (8 * parameters, False)):
        monkeypatch.setattr(streaming, "available_bytes", lambda size=available: size)
        assert streaming.is_large(Checkpoint(folder)) == large
        assert predictions.predicts_streamed(folder, "text-generation") == large
        assert not predictions.predicts_streamed(folder, "text-classification")


def test_the_limit_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "none", tmp_path / "max", tmp_path / "limit"
    monkeypatch.setattr(streaming, "LIMIT_FILES", files)
    free = streaming.available_bytes()
    files[1].write_text("max\n")
    assert streaming.available_bytes() > 0.5 * free
    files[2].write_text("12345\n")
    assert streaming.available_bytes() == 12345


def test_a_row_of_nan_is_told(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", "llama", shard="1GB")
    edited(folder, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(InputError, match="the logits of 9 of 9 rows are NaN or infinite"):
        predictions.predict_streamed(folder, processor_of(folder), tiny.data().evaluation.rows, 4, tmp_path / "scratch")


def test_the_first_layer_moves_hidden_states_as_the_model_does(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", "mistral")
    model, whole = StreamedModel(folder), load(folder)
    ids = {"input_ids": torch.from_numpy(np.stack(tiny.blocks(2, 5).rows)).long()}
    with torch.inference_mode():
        expected = whole(**ids, output_hidden_states=True, use_cache=False).hidden_states[1]
        with model.layer(0) as layer:
            found = model.run(0, layer, {**ids, HIDDEN: model.embed(ids)})
    assert torch.equal(found, expected)
