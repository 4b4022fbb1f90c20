"""Low-rank adapters: what is trained, what it becomes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from compress.recipe import check
from compress.run.prepare import prepare
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.labels.classes import ClassIds
from foundation.models.checkpoint import load
from foundation.training.few_parameters.lora import Lora, adapted
from foundation.training.kept_zeros import block_linears, keep_zeros
from prune.sparsify.sparsify import Sparsify
from tests.foundation import tiny_gpt
from tests.foundation.training.test_train import Dies, Killed, assert_equal, peak, run
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

SENTENCES = ["the film was good", "a dull film", "good good story", "a story", "was dull", "the good"]


@pytest.fixture(scope="module")
def sentences() -> tuple[list[str], ClassIds]:
    rows = [f"{row} {number}" for number in range(4) for row in SENTENCES]
    return rows, ClassIds(np.array(["good" in row.split() for row in rows], np.int64))


def trained(model: nn.Module, lora: Lora, x: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Trains the adapters for some steps by hand; returns A [r, I] and B [O, r] of each layer."""
    with adapted(model, lora, 0, "finetune"):
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(learned, lr=0.5)
        for _ in range(3):
            model(**x).logits.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {
            name.removesuffix(".lora_A.default"): (
                module.weight.detach().clone(),
                model.get_submodule(name.replace("_A", "_B")).weight.detach().clone(),
            )
            for name, module in model.named_modules()
            if name.endswith(".lora_A.default")
        }  # type: ignore[return-value]


@settings(max_examples=8)
@given(st.integers(1, 40), st.integers(1, 64), st.sampled_from([("*",), ("*.query", "*.value"), ("*.dense",)]))
def test_adapters_become_part_of_the_weights(tiny_bert: Path, rank: int, alpha: int, layers: tuple[str, ...]) -> None:
    model, before = load(tiny_bert).eval(), load(tiny_bert).state_dict()
    x = {"input_ids": torch.randint(5, 20, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    kinds = {name: type(module) for name, module in model.named_modules()}
    found = trained(model, Lora(rank=rank, alpha=alpha, layers=layers), x)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert all(parameter.requires_grad for parameter in model.parameters())
    suffixes = tuple(layer.removeprefix("*") for layer in layers)
    assert set(found) == {name for name in block_linears(model) if name.endswith(suffixes)}
    for name, value in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if kind == "weight" and owner in found:
            a_rI, b_Or = found[owner]
            assert a_rI.shape[0] == b_Or.shape[1] == rank
            change = torch.zeros_like(value)
            for component in range(rank):
                change += alpha / rank * torch.outer(b_Or[:, component], a_rI[component])
            torch.testing.assert_close(value, before[name] + change, rtol=1e-4, atol=1e-5)
            assert not torch.equal(value, before[name])
        elif name.startswith("classifier"):
            assert not torch.equal(value, before[name])  # a head may be new
        else:
            assert torch.equal(value, before[name]), name


def test_merging_changes_no_answer(tiny_bert: Path) -> None:
    model = load(tiny_bert).eval()
    x = {"input_ids": torch.randint(5, 20, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    with adapted(model, Lora(), 0, "finetune"), torch.no_grad():
        before = load(tiny_bert).eval()(**x).logits
        torch.testing.assert_close(model(**x).logits, before)  # training starts at the model
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
        inside = model(**x).logits
    assert not torch.allclose(inside, before, atol=1e-2)
    torch.testing.assert_close(model(**x).logits, inside, rtol=1e-4, atol=1e-4)


def test_the_output_layer_of_a_language_model_stays() -> None:
    model = load(tiny_gpt.checkpoint("gpt2"))
    with adapted(model, Lora(rank=2), 0, "finetune"):
        assert {name.rpartition(".lora_")[1] for name, parameter in model.named_parameters() if parameter.requires_grad} == {".lora_"}


def test_a_killed_run_continues_to_equal_bits(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lora": Lora(rank=3, dropout=0.2), "select": peak, "evaluate_every": 2}
    whole, expected = run(tiny_bert, sentences, told, tmp_path / "whole", **changes)
    with pytest.raises(Killed):
        run(tiny_bert, sentences, told, tmp_path / "killed", Dies(7), checkpoint_seconds=0, **changes)
    with safe_open(next((tmp_path / "killed").rglob("tensors.safetensors")), "pt") as file:
        names = [name for name in file.keys() if name.startswith("now.")]  # noqa: SIM118
        assert all("lora_" in name or "classifier" in name for name in names), names
        assert any("lora_" in name for name in names)
    torch.manual_seed(99)
    resumed, history = run(tiny_bert, sentences, told, tmp_path / "killed", **changes)
    assert "resumed after step 7" in "".join(told.lines)
    assert_equal(whole, resumed)
    assert peak(whole) == pytest.approx(expected.best, abs=1e-3)
    assert (history.losses, history.selection, history.best_step) == (expected.losses, expected.selection, expected.best_step)


def test_it_learns(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    _, history = run(tiny_bert, sentences, told, tmp_path, epochs=30, learning_rate=3e-3, lora=Lora())
    assert history.losses[-1]["loss"] < 0.2 < history.losses[0]["loss"]


def test_the_seed_decides_the_random_matrices(tiny_bert: Path) -> None:
    def first(seed: int) -> Tensor:
        model = load(tiny_bert)
        torch.manual_seed(int(torch.randint(0, 100, ())))  # whatever the generator outside holds
        with adapted(model, Lora(), seed, "finetune"):
            return next(value for name, value in model.state_dict().items() if "lora_A" in name).clone()

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


def test_a_pattern_without_a_layer_is_refused(tiny_bert: Path) -> None:
    with raises_problem("finetune.lora.layers", "'*.q_proj'", "matches no linear layer", "named like bert"):
        trained(load(tiny_bert), Lora(layers=("*.query", "*.q_proj")), {})


def test_a_model_that_keeps_its_zeros_is_refused(tiny_bert: Path) -> None:
    model = load(tiny_bert)
    keep_zeros(model)
    with pytest.raises(InputError, match=r"recover\.lora: given for a model that keeps its zeros"), adapted(model, Lora(), 0, "recover"):
        pass


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ("finetune", "stages.finetune"),
        ("distill", "stages.distill"),
        ("prune", "stages.prune.recover"),
    ],
)
def test_a_pattern_without_a_layer_is_refused_before_the_first_stage(stage: str, key: str, tmp_path: Path) -> None:
    lora: dict[str, Any] = {"lora": {"layers": ["*.no_such"]}}
    settings: dict[str, Any] = {"finetune": lora, "distill": lora, "prune": {"sparsity": 0.5, "recover": lora}}[stage]
    first = [] if stage == "finetune" else [{"finetune": {"epochs": 1}}]
    raw = {
        "name": "adapters",
        "model": {"config": tiny_gpt.CONFIGS["gpt2"], "init": "random", "task": "text-generation"},
        "tokenizer": {"train": "bpe", "vocab_size": tiny_gpt.VOCABULARY},
        "data": {"path": str(tiny_gpt.data_folder()), "max_length": tiny_gpt.LENGTH},
        "stages": [*first, {stage: settings}],
    }
    with raises_problem(f"{key}.lora.layers", "'*.no_such'", "matches no linear layer"):
        prepare(check(raw), tmp_path, ConsoleProgress("quiet")).count_macs()


def test_zeros_and_adapters_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"recover\.lora: given; .* fill the zeros: leave it out"):
        Sparsify.model_validate({"method": "magnitude", "sparsity": 0.5, "recover": {"lora": {}}})
