"""Experts that are dealt out: what ranks say adds up to what the whole layer says, and divided checkpoints answer like undivided ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from export.divided import dealt_experts
from export.divided.folder import check_division, expert_layers
from export.divided.placement import Placement, in_order
from export.divided.ranks import Meeting
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from foundation.models.layers.experts import separate_experts, with_separate_experts
from tests.export.divided.divided_checkpoints import FAMILIES, answers, divided_answers, inputs, quantized

pytestmark = pytest.mark.whole

KEY = "stages.export.tensor_parallel"
FAMILY = "qwen3-moe"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("placement", [in_order(4, 2), in_order(4, 4), ((0, 3), (1, 2)), ((2,), (0,), (3,), (1,))], ids=str)
def test_what_ranks_say_adds_up_to_what_all_experts_say(placement: Placement) -> None:
    """Against the experts written out; each rank has E / N of them, under their own numbers."""
    ranks = len(placement)
    torch.manual_seed(0)
    config, auto = FAMILIES[FAMILY][0](), FAMILIES[FAMILY][1]
    stock = auto.from_config(config)
    state = {name: torch.randn_like(value) for name, value in stock.state_dict().items()}
    stock.load_state_dict(state)
    path = "model.layers.0.mlp.experts"
    states_ND, weights_Nk = torch.randn(7, 32), torch.rand(7, 2)
    chosen_Nk = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 0], [0, 2], [3, 1], [2, 0]])
    gates, ups = state[f"{path}.gate_up_proj"].chunk(2, dim=1)
    expected = torch.zeros(7, 32)
    for n in range(7):
        for expert, weight in zip(chosen_Nk[n].tolist(), weights_Nk[n], strict=True):
            inner = torch.nn.functional.silu(gates[expert] @ states_ND[n]) * (ups[expert] @ states_ND[n])
            expected[n] += weight * (state[f"{path}.down_proj"][expert] @ inner)
    meeting, layers = Meeting(ranks), []
    for rank in range(ranks):
        model = auto.from_config(config)
        model.load_state_dict(state)
        dealt_experts.hold(with_separate_experts(model), dict.fromkeys(separate_experts(model), placement[rank]))
        held = {name.split(".")[-2] for name in model.state_dict() if f"{path}.down_proj" in name}
        assert held == set(map(str, placement[rank]))
        layers.append(dealt_experts.DealtExperts(separate_experts(model)[path], meeting.of(rank)))
    with torch.inference_mode():
        found = meeting.together([lambda layer=layer: layer(states_ND, chosen_Nk, weights_Nk) for layer in layers])
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-3)


IN_ORDER = [in_order(4, 2)] * 2
MIXED = [((0, 3), (1, 2)), ((1, 3), (0, 2))]
"""Another placement for each layer."""


@pytest.mark.parametrize(
    ("scheme", "placements"),
    [
        ("w8a8", IN_ORDER),
        ("w8a8", MIXED),
        *(pytest.param(scheme, found, marks=pytest.mark.slow) for scheme in ("w4a16", "fp8") for found in (IN_ORDER, MIXED)),
        *(pytest.param(scheme, [in_order(4, 4)] * 2, marks=pytest.mark.slow) for scheme in ("w8a8", "w4a16", "fp8")),
    ],
)
def test_ranks_with_whole_experts_give_the_logits_of_the_whole(scheme: str, placements: list[Placement], tmp_path: Path) -> None:
    """To the bit in int8: two experts a token are added, in either order; a rank has its share of experts and of attention."""
    checkpoint, features = quantized(FAMILY, scheme), inputs(FAMILY)
    expected = answers(checkpoint, features)
    ranks, named = len(placements[0]), dict(zip(expert_layers(Checkpoint(checkpoint).config), placements, strict=True))
    for found in divided_answers(checkpoint, features, ranks, tmp_path / "out", named):
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if scheme == "w8a8" else 1e-4)
    seen: list[str] = []
    for rank in range(ranks):
        stored = load_file(tmp_path / "out" / f"rank-{rank}-of-{ranks}" / "rank.safetensors")
        own = {name for name in stored if ".experts.down_proj." in name}
        for layer, placement in enumerate(placements):
            held = {name.split(".")[6] for name in own if name.startswith(f"model.layers.{layer}.")}
            assert held == set(map(str, placement[rank]))
        seen += own
        assert stored["model.layers.0.self_attn.q_proj.weight"].shape[0] == 32 // ranks
    assert len(seen) == len(set(seen)) == 2 * 4


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    three = transformers.MixtralConfig(**{**FAMILIES["mixtral"][0]().to_dict(), "architectures": ["MixtralForCausalLM"]})
    with pytest.raises(InputError, match="2 given, but block 0 has 3 experts"):
        check_division(three, 2, KEY, whole_experts=True)
    llama = transformers.LlamaConfig(**{**FAMILIES["llama"][0]().to_dict(), "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(InputError, match="whole experts are asked for of llama, which has none"):
        check_division(llama, 2, KEY, whole_experts=True)
