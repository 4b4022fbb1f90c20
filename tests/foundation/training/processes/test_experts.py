"""Experts of a mixture that processes spread: losses and gradients of one process, the capacity, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.recipe import check
from compress.run.prepare import prepare
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Parallel
from foundation.machine.parallel import ALONE, Team
from foundation.models.architecture.expert_shares import check_experts
from foundation.models.layers.expert_parallel import StackedExperts, experts_to_spread, stacked_where_listed, within_capacity
from foundation.training.choices import Optimizer
from foundation.training.optimizers import check_optimizer, optimizer_of, parameter_groups
from tests.foundation.training.processes import expert_processes
from tests.problems import raises_problem
from tests.ranks import in_ranks

RECIPE: dict[str, Any] = {
    "name": "experts",
    "model": {"config": {"model_type": "vit"}, "init": "random", "task": "image-classification", "head": "new"},
    "data": {"path": "sklearn:digits"},
    "stages": [{"finetune": {}}],
}
OTHERS = ("qwen2_moe", "gpt_oss", "switch_transformers", "nllb-moe")


def test_a_step_is_a_step_of_one_process_with_the_same_capacity() -> None:
    in_ranks(2, expert_processes.compare, "mixtral", 2, "ddp", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["mixtral", *OTHERS])
def test_a_step_is_a_step_of_one_process(kind: str, strategy: str) -> None:
    in_ranks(2, expert_processes.compare, kind, 2, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "experts", "strategy", "capacity", "parts"), [
    ("mixtral", 2, "ddp", None, 1),
    ("mixtral", 2, "fsdp2", None, 2),
    ("mixtral", 4, "ddp", None, 2),
    ("mixtral", 4, "fsdp2", 0.7, 1),
    ("switch_transformers", 2, "fsdp2", None, 2),
    ("nllb-moe", 4, "ddp", None, 1),
])  # fmt: skip
def test_a_step_of_four_processes_is_a_step_of_one(kind: str, experts: int, strategy: str, capacity: float | None, parts: int) -> None:
    in_ranks(4, expert_processes.compare, kind, experts, strategy, capacity, parts)


@pytest.mark.slow
def test_a_layer_sends_as_many_bytes_as_the_formula_says() -> None:
    in_ranks(2, expert_processes.count_bytes)


@given(st.data(), st.integers(1, 5), st.integers(0, 30), st.integers(0, 12))
def test_an_expert_keeps_its_largest_weights(data: st.DataObject, experts: int, choices: int, most: int) -> None:
    numbers = data.draw(st.lists(st.integers(0, experts - 1), min_size=choices, max_size=choices))
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75]), min_size=choices, max_size=choices))
    expected = []
    for place, (number, weight) in enumerate(zip(numbers, weights, strict=True)):
        before = sum(
            other == number and (theirs > weight or (theirs == weight and at < place))
            for at, (other, theirs) in enumerate(zip(numbers, weights, strict=True))
        )
        expected.append(before < most)
    found = within_capacity(torch.tensor(weights), torch.tensor(numbers, dtype=torch.int64), most)
    assert found.tolist() == expected


@pytest.mark.parametrize("kind", ["switch_transformers", "nllb-moe"])
def test_experts_that_were_stacked_get_their_weights_back(kind: str) -> None:
    model = expert_processes.model(kind)
    before, order = {name: value.clone() for name, value in model.state_dict().items()}, list(model.state_dict())
    with stacked_where_listed(model, spreads=True):
        modules = experts_to_spread(model)
        assert all(isinstance(module, StackedExperts) for module in modules.values())
        for module in modules.values():
            for weight in module.parameters():
                weight.data += 1
        names = {name for name, _ in model.named_parameters()}
        assert not any(".expert_" in name for name in names)
        assert model.get_parameter(next(name for name in names if name.endswith("_weight"))).shape[0] == 4
    after = model.state_dict()
    assert list(after) == order
    assert all(torch.equal(value, before[name] + (".expert_" in name)) for name, value in after.items())
    with stacked_where_listed(model, spreads=False):
        assert not experts_to_spread(model)


def test_biases_of_stacked_experts_do_not_decay() -> None:
    model = expert_processes.model("gpt_oss")
    free = {id(weight) for group in parameter_groups(model, 0.1) if not group["weight_decay"] for weight in group["params"]}
    biases = {name for name, weight in model.named_parameters() if id(weight) in free and weight.ndim > 1}
    assert biases == {f"model.layers.{layer}.mlp.experts.{name}_bias" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")}


def test_biases_of_stacked_experts_are_not_scaled_where_processes_spread_them() -> None:
    model = expert_processes.model("gpt_oss")
    weight: Any
    for name, weight in model.named_parameters():
        if ".experts." in name:
            weight.device_mesh = "expert"  # as weights that are spread have one; they are groups of their own
    groups = optimizer_of(Optimizer(name="lamb"), model, 1e-3, 0.1).param_groups
    scaled = {id(weight) for group in groups if group["scaled"] for weight in group["params"]}
    assert len(groups) == 4
    assert {name for name, weight in model.named_parameters() if id(weight) not in scaled and ".experts." in name} == {
        f"model.layers.{layer}.mlp.experts.{name}_bias" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")
    }


def test_adafactor_is_refused_with_a_remedy_that_helps() -> None:
    with raises_problem("finetune.optimizer", "parallel: {experts: 2}", "or parallel: {strategy: ddp} without experts"):
        check_optimizer(Optimizer(name="adafactor"), Parallel(experts=2).of(Team(0, 2)), "finetune")


def test_a_section_sets_the_team() -> None:
    parallel = Parallel(experts=2, expert_capacity=1.25)
    team = parallel.of(Team(3, 4))
    assert (team.experts, team.expert_rank, team.data_size, team.shards, team.runs_together) == (2, 1, 4, True, True)
    assert (team.settings, team.plan) == ("experts: 2", "ddp, experts 2")
    assert parallel.of(ALONE) is ALONE
    assert {"experts", "expert_capacity"}.isdisjoint(Parallel().model_dump())
    with raises_problem("parallel.experts", "4 given for 6 processes", "give 1 or 2 or 3 or 6"):
        Parallel(experts=4).of(Team(0, 6))


@pytest.mark.parametrize(("given", "named"), [
    ({"expert_capacity": 1.25}, "expert_capacity: 1.25 given without experts"),
    ({"experts": 2, "tensor": 2}, "tensor: 2 given with experts: 2"),
    ({"experts": 2, "context": 2}, "context: 2 given with experts: 2"),
    ({"experts": 2, "pipeline": 2}, "pipeline: 2 given with experts: 2"),
    ({"experts": 2, "gradients": "fp16"}, "gradients: fp16 given with experts: 2"),
    ({"experts": 2, "strategy": "fsdp2", "offload": True}, "offload: true given with experts: 2"),
])  # fmt: skip
def test_a_section_refuses_what_does_not_go_together(given: dict[str, Any], named: str) -> None:
    with raises_problem("parallel", named):
        check({**RECIPE, "parallel": given})


@pytest.mark.parametrize(("kind", "processes", "adapters", "named"), [
    ("mixtral", 3, False, ("3 given", "layers of 4 experts", "give 1 or 2 or 4")),
    ("switch_transformers", 2, True, ("2 given", "experts that adapters change", "give experts: 1")),
])  # fmt: skip
def test_experts_that_cannot_be_spread_are_refused(kind: str, processes: int, adapters: bool, named: tuple[str, ...]) -> None:
    config = expert_processes.model(kind).config
    task: Any = "text-to-text" if config.is_encoder_decoder else "text-generation"
    check_experts(config, task, 2, "finetune")
    with raises_problem("finetune: parallel.experts", *named):
        check_experts(config, task, processes, "finetune", adapters)


def test_a_model_without_experts_is_refused_before_anything_runs(tiny_bert: Path) -> None:
    from transformers import AutoConfig

    with raises_problem("finetune: parallel.experts", "2 given", "this bert is no mixture of experts", "give experts: 1"):
        check_experts(AutoConfig.from_pretrained(tiny_bert), "text-classification", 2, "finetune")


@pytest.mark.parametrize(("stage", "key", "named"), [
    ({"quantize": {"mode": "qat"}}, "quantize.mode", "qat given with parallel.experts: 2"),
    ({"prune": {"granularity": ["experts"], "measure": "parameters", "sparsity": 0.25}}, "prune.divisible_by", "2 processes spread"),
])  # fmt: skip
def test_stages_that_do_not_spread_experts_say_so(stage: dict[str, Any], key: str, named: str, tmp_path: Path) -> None:
    parallel = Parallel(experts=2)
    config = {"model_type": "mixtral", "num_local_experts": 4, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    (tmp_path / "train.txt").write_text("\n".join(f"row {number} of the text" for number in range(40)) + "\n")
    (tmp_path / "test.txt").write_text("one more row of the text\nand the last one\n")
    raw = {
        "name": "experts",
        "model": {"config": config, "init": "random", "task": "text-generation"},
        "tokenizer": {"train": "bpe", "vocab_size": 300},
        "data": {"path": str(tmp_path), "max_length": 8},
        "parallel": parallel.model_dump(),
        "stages": [{"finetune": {}}, stage],
    }
    with raises_problem(f"stages.{key}", named):
        prepare(check(raw), tmp_path / "run", ConsoleProgress("silent"), parallel.of(Team(0, 2))).count_macs()
