"""Slices across the matrices of a block: their sizes and masks beside loops written out, the stage, and that compaction removes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.artifacts.artifact import Artifact
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from prune.compact.compact import Compact
from prune.sparsify.lasso import EPSILON, Lasso, Penalty
from prune.sparsify.slices import Bundle, bundles, slice_masks, with_neurons_sorted, zero_slices
from prune.sparsify.sparsify import Sparsify
from prune.sparsify.target_layers import target_layers

KEY = "stages.sparsify"


def parts(model: nn.Module, lines: int) -> tuple[Structure, dict[str, nn.Linear], dict[str, Tensor], list[Bundle]]:
    structure, layers = Structure.of(model, KEY), target_layers(Sparsify(method="magnitude"), model)
    weights = {name: layer.weight.detach() for name, layer in layers.items()}
    return structure, layers, weights, bundles(model, structure, weights, lines)


def by_hand(model: Any, lines: int) -> list[list[list[Tensor]]]:
    """Of a BERT with heads of 4: for each block the heads, then the groups of neurons, each as its pieces of the matrices."""
    found = []
    for layer in model.bert.encoder.layer:
        own, out = layer.attention.self, layer.attention.output.dense.weight
        rows = [own.query.weight, own.key.weight, own.value.weight]
        found.append([[*(weight[4 * head : 4 * head + 4] for weight in rows), out[:, 4 * head : 4 * head + 4]] for head in range(4)])
        up, down = layer.intermediate.dense.weight, layer.output.dense.weight
        found.append([[up[start : start + lines], down[:, start : start + lines]] for start in range(0, 24, lines)])
    return found


@pytest.mark.parametrize("lines", [1, 5, 8, 24])
def test_squares_and_sizes_are_sums_over_all_matrices(lines: int, make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    _, _, weights, found = parts(model, lines)
    expected = by_hand(model, lines)
    assert len(found) == len(expected) == 6
    for bundle, groups in zip(found, expected, strict=True):
        squares = [float(sum(piece.detach().double().square().sum() for piece in group)) for group in groups]
        assert bundle.squares(weights).tolist() == pytest.approx(squares)
        assert bundle.sizes(weights).tolist() == [sum(piece.numel() for piece in group) for group in groups]


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_zeroed_slices_are_what_compaction_removes(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    from prune.compact.disconnected import disconnect

    model = make_model(kind)
    structure, layers, weights, found = parts(model, 6)
    stays = slice_masks(weights, found, 0.6, together=True)
    zero_slices(layers, found, stays)
    gone = disconnect(model, structure, make_features(kind))
    for bundle, stays_G in zip(found, stays, strict=True):
        units = 6 if bundle.what == "ffn" else 1
        expected = (~stays_G).repeat_interleave(units)
        assert gone.unread[bundle.block, bundle.what].tolist() == expected.tolist(), bundle.name
    zeros = sum(int((layer.weight == 0).sum()) for layer in layers.values()) / sum(weight.numel() for weight in weights.values())
    assert 0.5 < zeros <= 0.6


def test_the_smallest_go_first_and_one_of_each_stays(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    _, _, weights, found = parts(model, 8)
    scores = [bundle.squares(weights) / bundle.sizes(weights) for bundle in found]
    stays = slice_masks(weights, found, 0.5, together=True)
    kept = [float(score) for values, mask in zip(scores, stays, strict=True) for score in values[mask]]
    gone = [float(score) for values, mask in zip(scores, stays, strict=True) for score in values[~mask]]
    total, size = sum(float(bundle.sizes(weights).sum()) for bundle in found), 0.0
    size = sum(float(bundle.sizes(weights)[~mask].sum()) for bundle, mask in zip(found, stays, strict=True))
    assert gone
    assert size <= 0.5 * total
    largest = {float(values.max()) for values in scores}
    fits = min(float(bundle.sizes(weights).min()) for bundle in found)
    assert 0.5 * total - size < fits or min(set(kept) - largest) >= max(gone)
    for mask in slice_masks(weights, found, 0.999, together=True):
        assert int(mask.sum()) == 1
    apart = slice_masks(weights, found, 0.5, together=False)
    assert [int(mask.sum()) for mask in apart] == [2, 2] * 3  # of four heads, and of three slices, of which one is less than half


def test_neurons_are_sorted_without_changing_the_answers(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure, _, weights, _ = parts(model, 1)
    ordered = with_neurons_sorted(model, structure, weights, KEY)
    _, _, after, found = parts(ordered, 1)
    for bundle in found:
        if bundle.what == "ffn":
            sizes = bundle.squares(after).tolist()
            assert sizes == sorted(sizes, reverse=True)
    features = make_features("bert")
    with torch.no_grad():
        torch.testing.assert_close(ordered(**features).logits, model(**features).logits, rtol=1e-5, atol=1e-5)


def test_a_step_of_the_penalty(make_model: Callable[..., Any]) -> None:
    """Each group shrinks by eta lambda beta / norm, over all of its matrices."""
    model = make_model("bert")
    _, layers, _, found = parts(model, 8)
    strengths: dict[str, float | None] = dict.fromkeys(layers, 2.0)
    penalty = Penalty(strengths, (), 1.0, 0.5, True, lambda step, num_steps: 0.1, bundles=found)
    objective = Lasso(lambda model, batch: {}, layers, penalty, model)  # type: ignore[arg-type, return-value]
    expected = [[[piece.detach().clone() for piece in group] for group in groups] for groups in by_hand(model, 8)]
    objective.shrink(model, 1, 10)
    for groups, now in zip(expected, by_hand(model, 8), strict=True):
        for group, pieces in zip(groups, now, strict=True):
            norm = float(sum(piece.double().square().sum() for piece in group) ** 0.5)
            factor = max(0.0, 1 - 0.1 * 2.0 / (norm + EPSILON) / norm)
            for piece, found_now in zip(group, pieces, strict=True):
                torch.testing.assert_close(found_now.detach(), piece * factor, rtol=1e-4, atol=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize("method", ["magnitude", "lasso"])
def test_the_stage_and_compaction(
    method: str, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    learning = {"epochs": 1, "learning_rate": 1e-3, "batch_size": 16}
    given = {"method": method, "pattern": {"slices": 4}, "sparsity": 0.6, "rows": 16, "learning": learning, "recover": None}
    stage, context, source = Sparsify.model_validate({"id": "sparsify", **given}), make_context(), checkpoint("bert")
    for folder in ("sparse", "small"):
        (tmp_path / folder).mkdir()
    config = Checkpoint(source).config
    stage.check(config, config, context)
    figures: Any = stage.run(Artifact(source, {"id": "baseline", "digest": "0" * 64}), context, tmp_path / "sparse")
    assert figures["pattern"] == "slices of 4"
    assert 0.5 < figures["sparsity"] <= 0.6
    compacted: Any = Compact(id="compact").run(Artifact(tmp_path / "sparse", {"id": "sparsify"}), context, tmp_path / "small")
    assert compacted["zeros"]["after"] == 0
    assert compacted["unread"] == {name: figures["unread"][name] for name in ("heads", "neurons")}
    features = {"input_ids": torch.randint(5, 20, (2, 8))}
    with torch.no_grad():
        small, large = (load(tmp_path / folder)(**features).logits for folder in ("small", "sparse"))
    torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "given", [{"method": "movement"}, {"method": "sparsegpt"}, {"method": "lasso", "lasso": {"threshold": "balanced"}}]
)
def test_settings_that_slices_do_not_go_with(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="slices of 32"):
        Sparsify.model_validate({"pattern": {"slices": 32}, **given})
