from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foundation.models.architecture.structure import Structure
from prune.allocation import Part, top
from prune.hook_points import HookPoints
from prune.sensitivity import SHARES, Sensitivity, scan, silenced, silenced_all
from prune.surgery import KeptUnits, shrink
from tests.seldom import seldom

KEY = "stages.prune"


@pytest.mark.whole
@pytest.mark.parametrize("kind", seldom(["bert", "gpt2", "vit", "llama"], ["gpt2", "vit"]))
def test_distances_are_those_of_the_shrunk_model(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model, features = make_model(kind), make_features(kind)
    structure = Structure.of(model, KEY)
    sizes = structure.sizes
    with torch.no_grad():
        expected = model(**features).logits

    def distance_of(other: Any) -> float:
        with torch.no_grad():
            return float((other(**features).logits - expected).square().mean())

    groups = sizes.key_value_heads[1]
    parts = [Part(1, "heads", groups, 1.0, groups), Part(2, "ffn", 24, 1.0, 24, 4)]
    generator = torch.Generator().manual_seed(0)
    scores = {part: torch.rand(part.size, generator=generator) for part in parts}
    passes: list[int] = []
    found = scan(model, structure, parts, scores, lambda: (distance_of(model), None), passes.append)
    assert len(passes) == len(parts) * len(SHARES)
    assert distance_of(model) == 0
    for entry in found:
        highest = 0.0
        for share, value in entry.distances.items():
            number = round((1 - share) * entry.part.size)
            kept = KeptUnits.everything(sizes)
            lists = list(getattr(kept, entry.part.component))
            lists[entry.part.block] = top(scores[entry.part], number)
            highest = max(highest, distance_of(shrink(model, structure, replace(kept, **{entry.part.component: lists}), KEY)))
            assert value == pytest.approx(highest, rel=1e-3, abs=1e-9)
    assert found[0].name == structure.attentions[1].output


def test_a_distance_is_a_line_between_what_was_measured() -> None:
    entry = Sensitivity(Part(0, "ffn", 8, 1.0, 8), "down", {0.25: 1.0, 0.5: 3.0, 0.75: 4.0})
    assert [entry.at(count) for count in (8, 7, 6, 5, 4, 2, 1)] == [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert entry.as_row() == {"name": "down", "what": "ffn", "distances": [[0.25, 1.0], [0.5, 3.0], [0.75, 4.0]]}


def test_a_silenced_expert_adds_nothing(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model, features = make_model("mixtral"), make_features("mixtral")
    structure = Structure.of(model, KEY)
    experts, seen = model.model.layers[1].mlp.experts, []
    with silenced(model, structure, HookPoints.of(model, structure), Part(1, "experts", 4, 1.0, 4), [0, 3]):
        handle = experts.register_forward_pre_hook(lambda module, args: seen.append(args))  # behind the one that silences
        model(**features)
    model(**features)
    handle.remove()
    (_, chosen, weights), (_, again, whole) = seen
    gone = (chosen == 1) | (chosen == 2)
    assert gone.any()
    assert torch.equal(chosen, again)
    assert torch.equal(weights, whole.masked_fill(gone, 0))


def test_all_together_are_silenced_and_let_go_again(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model, features = make_model("bert"), make_features("bert")
    structure = Structure.of(model, KEY)
    kept = replace(KeptUnits.everything(structure.sizes), heads=[(1,), range(4), (0, 3)], ffn=[range(5), range(24), (7,)])
    small = shrink(model, structure, kept, KEY)
    with torch.no_grad():
        whole = model(**features).logits
        with silenced_all(model, structure, HookPoints.of(model, structure), kept):
            torch.testing.assert_close(model(**features).logits, small(**features).logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(model(**features).logits, whole)


def test_one_number_of_units_is_measured_once(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    part, asked, passes = Part(1, "ffn", 24, 1.0, 24, 16), list[float](), list[int]()

    def look() -> tuple[float, float]:
        asked.append(float(len(asked) + 1))
        return asked[-1], 1 / asked[-1]

    (found,) = scan(model, structure, [part], {part: torch.rand(24)}, look, passes.append)
    assert asked == [1.0, 2.0]
    assert found.distances == {0.25: 1.0, 1 - 16 / 24: 2.0}
    assert found.metrics == {0.25: 1.0, 1 - 16 / 24: 0.5}
    assert found.as_row()["metrics"] == [[0.25, 1.0], [1 - 16 / 24, 0.5]]
    assert len(passes) == len(SHARES)
