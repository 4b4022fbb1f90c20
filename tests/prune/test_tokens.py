"""Tokens leave a model as a recipe asks, through the whole run; models that need all of them are refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from compress.artifacts.run_folder import open_run
from compress.core.errors import InputError
from compress.core.progress import ConsoleProgress
from compress.models.architecture.structure import Structure
from compress.models.checkpoint import load
from compress.models.layers.conv1d import with_linears
from compress.pipeline import run
from compress.stage.context import Context
from distill.distill import Distill
from distill.injected import Injected
from prune.prune import Prune
from prune.tokens import check_tokens, prove_tokens, shares_of, with_tokens
from tests.architectures.steps import drawn
from tests.architectures.table import ARCHITECTURES, VOCABULARY
from tests.export import sentiment
from tests.prune import small_runs

KEY = "stages.prune"
BRIEF: dict[str, Any] = {"sparsity": 0, "rows": 16, "recover": {"epochs": 1, "batch_size": 16}}


def test_shares_are_those_given_and_the_last_one_after_them() -> None:
    assert shares_of((0.5, 0.25), 4, KEY) == (0.5, 0.25, 0.25, 0.25)
    assert shares_of((0.5, 0.25), 3, KEY) == (0.5, 0.25, 0.25)
    with pytest.raises(InputError, match=r"3 shares given for a model of 3 layers; give at most 2"):
        shares_of((0.5, 0.4, 0.3), 3, KEY)
    with pytest.raises(InputError, match="a model of one layer"):
        shares_of(0.5, 1, KEY)


@given(st.floats(0.01, 0.99), st.integers(2, 24))
def test_a_number_is_reached_in_even_steps(share: float, depth: int) -> None:
    shares = shares_of(share, depth, KEY)
    assert len(shares) == depth
    assert shares[-1] == shares[-2] == pytest.approx(share)
    np.testing.assert_allclose(np.diff(np.log([1.0, *shares[:-1]])), np.log(share) / (depth - 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tokens": [0.25, 0.5]}, "give falling shares"),
        ({"tokens": 0.5, "measure": "latency", "speedup": 2}, "give macs"),
        ({"tokens": 0.5, "recover": {"hidden_weight": 1}}, "give 0"),
        ({"tokens": 0.0}, "greater than 0"),
        ({"tokens": []}, "at least 1"),
        ({"tokens": [1.5]}, "less than or equal to 1"),
    ],
)
def test_settings_that_contradict_are_one_line(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Prune(**settings)


def features(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask}


@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "electra"])
def test_models_that_read_the_first_token_are_taken(name: str) -> None:
    model = with_linears(drawn(ARCHITECTURES[name]))
    check_tokens(model, Structure.of(model, KEY), "text-classification", KEY)
    prove_tokens(model, features(model), KEY)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("modernbert", "change queries or keys before they meet"),
        ("roformer", "change queries or keys before they meet"),
        ("deberta-v2 (share_att_key)", "change queries or keys before they meet"),
        ("mpnet", "does not run without some tokens"),
        ("bart", "the decoder of a bart reads all tokens"),
        ("gpt2", "reads other tokens than the first"),
    ],
)
def test_models_that_need_all_tokens_are_refused(name: str, told: str) -> None:
    model = with_linears(drawn(ARCHITECTURES[name]))

    def check() -> None:
        check_tokens(model, Structure.of(model, KEY), "text-classification", KEY)
        prove_tokens(model, features(model), KEY)

    with pytest.raises(InputError, match=told):
        check()


class Counting(transformers.BertForSequenceClassification):
    """A BERT whose second layer sees how far a token stands from the first one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert.encoder.layer[1].register_forward_pre_hook(self.count)

    @staticmethod
    def count(block: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        states_BLD = args[0].clone()
        states_BLD[..., 0] += torch.arange(states_BLD.shape[1])
        return states_BLD, *args[1:]


def test_a_layer_that_reads_where_tokens_stand_is_refused(make_model: Callable[..., Any]) -> None:
    drawn_model = make_model("bert")
    model = Counting(drawn_model.config).eval()
    model.load_state_dict(drawn_model.state_dict())
    with pytest.raises(InputError, match="the layers of this bert read where tokens stand"):
        prove_tokens(model, {name: value % 20 for name, value in features(model).items()}, KEY)


def test_a_task_with_an_answer_for_each_token_is_refused(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    with pytest.raises(InputError, match="token-classification needs the states of all tokens"):
        check_tokens(model, Structure.of(model, KEY), "token-classification", KEY)


def test_nothing_is_trained_before_a_model_is_refused(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    folder = checkpoint("bert", position_embedding_type="absolute")
    config = load(folder).config
    context = replace(make_context(folder), losses=Injected())
    Prune(tokens=(0.5,), **BRIEF).check(config, config, context)
    with pytest.raises(InputError, match="4 shares given for a model of 3 layers"):
        Prune(tokens=(0.5, 0.4, 0.3, 0.2), **BRIEF).check(config, config, context)
    with pytest.raises(InputError, match="tokens leave the student on the way: give soft_target"):
        Prune(tokens=(0.5,), **{**BRIEF, "recover": {"loss": "minilm"}}).check(config, config, context)
    dropping = with_tokens(load(folder), (0.5, 0.5, 0.5), KEY).config
    with pytest.raises(InputError, match="tokens leave the student on the way: give soft_target"):
        Distill(loss="tinybert").check(dropping, config, context)


def test_the_stage_keeps_weights_and_trains_with_what_stays(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    folder = checkpoint("bert")
    model, figures = small_runs.pruned(Prune(tokens=(0.5, 0.25), **BRIEF), folder, make_context(folder), tmp_path / "out")
    assert figures["after"]["tokens"] == (0.5, 0.25, 0.25)
    assert figures["before"]["heads"] == figures["after"]["heads"]
    assert figures["sparsity"] == 0
    assert [len(step["losses"]) for step in figures["steps"]] == [1]
    plain = load(folder)
    assert {name: value.shape for name, value in model.state_dict().items()} == {n: v.shape for n, v in plain.state_dict().items()}
    assert not torch.equal(model.get_parameter("classifier.weight"), plain.get_parameter("classifier.weight"))


@pytest.mark.whole
@pytest.mark.usefixtures("engines_inside")
def test_a_run_serves_a_model_that_tokens_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    monkeypatch.setattr("compress.measure.latency.measure", lambda specs, shapes, progress: [])
    stages: list[dict[str, Any]] = [
        {"prune": {"sparsity": 0.3, "multiple_of": 8, "rows": 32, "tokens": [0.5], "recover": {"epochs": 0.5}}},
        {"quantize": {"calibration": {"rows": 32}, "mode": "ptq", "attention": True}},
        {"export": {}},
        {"triton_repo": {"serve": False}},
    ]
    made = small_runs.recipe(tmp_path, "tokens", sentiment.rows(100), ["openvino"], stages)
    outcome = run(made, tmp_path / "run", progress=ConsoleProgress("quiet"))
    pruned, variant = outcome.report["variants"][1:]
    assert variant["accuracy"]["openvino"]["n"] == 10
    assert pruned["pruning"]["after"]["tokens"] == [0.5, 0.5]
    graph = onnx.load(next((open_run(outcome.folder).artifacts["export"].path).glob("quantize-int8/model.onnx"))).graph
    assert sum(node.op_type == "TopK" for node in graph.node) == 1
    assert "50 % behind the blocks but the last" in (outcome.folder / "report.html").read_text()
