"""The stages that prune an encoder-decoder: every method on either side, what is refused, and what quantize and export make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from export.engines.openvino_genai import properties
from export.engines.openvino_seq2seq import OpenVinoSeq2Seq
from export.engines.spec import EngineSpec
from export.generation.encoder_decoder_folder import write_encoder_decoder_folder
from export.generation.on_grids import on_grids
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.models.architecture.blocks import blocks_of
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, load_float
from foundation.models.encoder_decoder import answered
from foundation.models.folder import Checkpoint
from foundation.models.inputs.padding import read_by_decoder
from foundation.standalone.encoder_decoder import DECODER
from prune.cost import ShapeCost
from prune.forward_order import in_forward_order, products
from prune.prune import Prune
from prune.scores import by_activation
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize
from tests.export.generation.tiny_encoder_decoders import PAD, checkpoint, context, preprocessor, sources
from tests.prune.small_runs import pruned
from tests.prune.test_encoder_decoder import features, parts

pytestmark = pytest.mark.whole


def test_activations_of_either_side_are_those_of_its_real_tokens() -> None:
    """Written out: the mean square of what each output projection reads, over the tokens of the source or of the target."""
    from foundation.training.train import Batch

    model, batch = load_float(checkpoint("bart")), features()
    structure = Structure.of(model, "stages.prune")
    found = by_activation(model, structure, lambda: iter([Batch(batch, torch.zeros(0), torch.arange(3), 0, 1)])).components
    read: dict[tuple[int, str], torch.Tensor] = {}
    for side, first, depth in (("encoder", 0, 2), ("decoder", 2, 3)):
        for layer in range(depth):
            for what, reader in parts(model, "bart", side, layer).items():
                reader.register_forward_pre_hook(lambda _, args, where=(first + layer, what): read.update({where: args[0]}))
    with torch.no_grad():
        model(**batch)
    source, target = batch["attention_mask"].bool(), read_by_decoder(batch["decoder_input_ids"], PAD)
    assert source.sum() != target.sum()
    for (block, what), x in read.items():
        kept = x[source if block < 2 else target]
        squares = kept.square() if what == "ffn" else kept.reshape(len(kept), 4, 8).square().sum(dim=2)
        expected = squares.mean(dim=0).sqrt()
        torch.testing.assert_close(found[block, what] / found[block, what].mean(), expected / expected.mean())  # type: ignore[index]
    assert {where for where in found if where[1] == "cross"} == {(2, "cross"), (3, "cross"), (4, "cross")}


def test_each_layer_is_shown_the_real_tokens_that_it_reads_after_the_changes_before_it() -> None:
    """Written out: after every change the whole model runs again; keys and values of the attention to the encoder read the source."""
    model, plain, batches = load_float(checkpoint("bart")), load_float(checkpoint("bart")), [features(0), features(1)]
    blocks = tuple(blocks_of(model, "stages.sparsify"))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.startswith(blocks)}
    others = {name: plain.get_submodule(name) for name in linears}
    found: dict[str, torch.Tensor] = {}

    def change(name: str, sums: torch.Tensor) -> None:
        found[name] = sums
        linears[name].weight.data *= 0.5

    assert in_forward_order(model, linears, batches, products, change, "stages.sparsify") == []
    assert found.keys() == linears.keys()
    pending: list[str] = []  # have read the same tensor as the layer before, and change with it
    for name in found:
        expected = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            seen: list[torch.Tensor] = []
            handle = others[name].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
            with torch.no_grad():
                plain(**batch)
            handle.remove()
            of_source = ".encoder." in name or "encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name
            mask = batch["attention_mask"].bool() if of_source else read_by_decoder(batch["decoder_input_ids"], PAD)
            expected = expected + products(seen[0][mask])
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)
        pending.append(name)
        names = list(found)
        following = names[names.index(name) + 1] if name != names[-1] else None
        if following is None or found[following].shape != found[name].shape or not torch.equal(found[following], found[name]):
            for other in pending:
                others[other].weight.data *= 0.5
            pending = []


EVERYTHING = ("heads", "ffn", "hidden", "layers")


@pytest.mark.parametrize(
    ("method", "granularity"),
    [
        pytest.param("magnitude", ("ffn", "layers"), marks=pytest.mark.slow),
        ("taylor", EVERYTHING),
        pytest.param("fisher", ("heads", "ffn"), marks=pytest.mark.slow),
        pytest.param("activation", EVERYTHING, marks=pytest.mark.slow),  # its scores are asked for above
        ("joint", EVERYTHING),
        ("movement", ("heads", "ffn")),
    ],
)
def test_every_method_prunes_either_side(method: Any, granularity: Any, tmp_path: Path) -> None:
    given = context("bart", tmp_path)
    stage = Prune(
        method=method,
        sparsity=0.4,
        granularity=granularity,
        multiple_of=8,
        rows=16,
        allocation="global",
        learn={"epochs": 2, "batch_size": 8},
        recover={"epochs": 1, "batch_size": 8, "learning_rate": 1e-4},
    )
    model, figures = pruned(stage, checkpoint("bart"), given, tmp_path / "out")
    costs = [ShapeCost.of(one, Structure.of(one, "model"), "macs").total() for one in (load_float(checkpoint("bart")), model)]
    assert figures["sparsity"] == pytest.approx(1 - costs[1] / costs[0])
    assert figures["sparsity"] >= 0.4
    assert len(answered(model, sources((4, 7)), 1, 6)) == 2


@pytest.mark.first(1)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_blocks_of_weights_go_on_either_side(kind: str, method: Any, tmp_path: Path) -> None:
    given, out = context(kind, tmp_path), tmp_path / "out"
    stage = Sparsify(method=method, pattern={"block": [4, 4]}, sparsity=0.5, rows=16, recover=None)
    out.mkdir()
    config = load_float(checkpoint(kind)).config
    stage.check(config, config, given)
    stage.run(given.teachers[0], given, out)
    weights = load_float(out).state_dict()
    for side in ("encoder", "decoder"):
        inside = [value for name, value in weights.items() if f"{side}.block." in name or f"{side}.layers." in name]
        matrices = [value for value in inside if value.ndim == 2 and min(value.shape) >= 32]
        zeros, everything = sum(int((value == 0).sum()) for value in matrices), sum(value.numel() for value in matrices)
        assert everything // 2 <= zeros <= 0.51 * everything  # SparseGPT also empties what no row reaches: neurons behind a ReLU


@pytest.mark.parametrize(
    ("kind", "granularity"), [pytest.param("t5", ("ffn", "layers"), marks=pytest.mark.slow), ("bart", ("heads", "ffn", "layers"))]
)
def test_the_engine_computes_the_pruned_and_quantized_model(kind: str, granularity: Any, tmp_path: Path) -> None:
    given, folder, out = context(kind, tmp_path), tmp_path / "pruned", tmp_path / "quantized"
    stage = Prune(sparsity=0.4, granularity=granularity, multiple_of=8, rows=16, allocation="global", recover=None)
    model, _ = pruned(stage, checkpoint(kind), given, folder)
    sizes = Structure.of(model, "model").sizes
    assert len(set(sizes.ffn)) > 1 or len(sizes.ffn) < 5
    out.mkdir()
    Quantize(mode="ptq").run(Artifact(folder, {"id": "prune", "digest": "1" * 64}), given, out)
    preprocessor().save(out)
    files = tmp_path / "files"
    write_encoder_decoder_folder(on_grids(Checkpoint(out)), files, {})
    options = {**properties(1, "fp32", "fp32"), "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    path = str(files / DECODER)
    spec = EngineSpec("openvino_seq2seq", "stateful", "int8", "fp32", "cpu", 1, path, str(out), (1,), options)
    with torch.no_grad():
        expected = load(out)(**features()).logits.numpy()
    found = OpenVinoSeq2Seq(spec).predict({name: value.numpy() for name, value in features().items()})
    real = read_by_decoder(features()["decoder_input_ids"], PAD).numpy()
    np.testing.assert_allclose(found[real], expected[real], atol=5e-5 * np.abs(expected).max())


def test_what_cannot_be_pruned_is_refused_with_the_reason(tmp_path: Path) -> None:
    given, config = context("t5", tmp_path), load_float(checkpoint("t5")).config
    for settings, message in (
        (
            {"granularity": ("heads",)},
            r"heads given; encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight has an entry for",
        ),
        ({"measure": "latency", "speedup": 2.0}, "latency given; the latency table does not cover the two stacks of an encoder-decoder"),
        ({"granularity": ("ffn",), "sparsity": 0.9}, r"pruning ffn can remove at most .*: add hidden or layers to granularity"),
        (
            {"granularity": ("vocabulary",)},
            r"stages\.prune\.granularity: vocabulary given; the rows of text-to-text are token ids of the incoming model, on which all "
            "variants are compared: leave it out$",
        ),
        (
            {"granularity": ("ffn",), "sparsity": 0.1, "recover": {"hidden_weight": 1.0}},
            r"hidden_weight: 1 given; a t5 has two stacks of layers: give losses",
        ),
    ):
        with pytest.raises(InputError, match=message):
            Prune.model_validate(settings).check(config, config, given)
