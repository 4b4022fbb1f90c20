"""Tokens leave a model as a recipe asks, through the whole run; models that need all of them are refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.linear_model import Ridge

from compress.pipeline import run
from distill.distill import Distill
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.models.architecture.blocks import blocks_of
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.layers.conv1d import with_linears
from foundation.schemes.int8 import has_vnni
from foundation.stage.context import Context
from foundation.training.train import Batch
from prune.prune import Prune
from prune.tokens.significance import FLOOR, HIGHEST, PROBES, RIDGE, significance
from prune.tokens.tokens import check_tokens, prove_tokens, shares_of, with_tokens
from tests.architectures.steps import drawn
from tests.architectures.table import ARCHITECTURES, VOCABULARY
from tests.export import sentiment
from tests.problems import raises_problem
from tests.prune import small_runs
from tests.prune.conftest import context_of
from tests.told import Told

pytestmark = pytest.mark.whole

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
    context = replace(make_context(folder))
    Prune(tokens=(0.5,), **BRIEF).check(config, config, context)
    with pytest.raises(InputError, match="4 shares given for a model of 3 layers"):
        Prune(tokens=(0.5, 0.4, 0.3, 0.2), **BRIEF).check(config, config, context)
    with pytest.raises(InputError, match="tokens leave the student on the way: give soft_target"):
        Prune(tokens=(0.5,), **{**BRIEF, "recover": {"loss": "minilm"}}).check(config, config, context)
    dropping = with_tokens(load(folder), (0.5, 0.5, 0.5), [torch.zeros(16)] * 3, KEY).config
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
    weights = {name: value.shape for name, value in plain.state_dict().items()}
    vectors = {f"bert.encoder.layer.{block}.significance": (16,) for block in (0, 1)}
    assert {name: value.shape for name, value in model.state_dict().items()} == weights | vectors
    assert not torch.equal(model.get_parameter("classifier.weight"), plain.get_parameter("classifier.weight"))


@pytest.mark.slow
@pytest.mark.usefixtures("engines_inside")
def test_a_run_serves_a_model_that_tokens_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    monkeypatch.setattr("foundation.measure.latency.measure", lambda specs, shapes, progress, *watched: [])
    stages: list[dict[str, Any]] = [
        {"prune": {"sparsity": 0.3, "multiple_of": 8, "rows": 32, "tokens": [0.5], "recover": {"epochs": 0.5}}},
        # without VNNI OpenVINO's products of two activations of 8 bits saturate at 16 bits, and the export refuses them
        {"quantize": {"calibration": {"rows": 32}, "mode": "ptq", "attention": has_vnni()}},
        {"export": {}},
        {"triton_repo": {"serve": False}},
    ]
    made = small_runs.recipe(tmp_path, "tokens", sentiment.rows(100), ["openvino"], stages)
    outcome = run(made, tmp_path / "run", progress=ConsoleProgress("quiet"))
    pruned, variant = outcome.report["variants"][1:]
    assert variant["accuracy"]["openvino"]["n"] == 10
    assert pruned["pruning"]["after"]["tokens"] == [0.5, 0.5]
    artifacts = open_run(outcome.folder).artifacts
    graph = onnx.load(next(artifacts["export"].path.glob("quantize-int8/model.onnx")))
    assert sum(node.op_type == "TopK" for node in graph.graph.node) == 1
    answers_as_torch(graph, load(artifacts["quantize"].path))
    assert "50 % of a row" in (outcome.folder / "report.html").read_text()


def answers_as_torch(graph: onnx.ModelProto, model: torch.nn.Module) -> None:
    """Checks a Q/DQ graph at lengths of which other numbers of tokens stay; a code on a rounding boundary moves single answers."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session, random = onnxruntime.InferenceSession(graph.SerializeToString(), options), np.random.default_rng(0)
    for length in (2, 7, sentiment.LENGTH):
        ids = random.integers(4, 20, (5, length))
        mask = (np.arange(length) < np.maximum(1, length - 2 * np.arange(5))[:, None]).astype(np.int64)
        given = {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        with torch.no_grad():
            expected = model(**{name: torch.from_numpy(value) for name, value in given.items()}).logits.numpy()
        (found,) = session.run(["logits"], given)
        assert np.median(np.abs(found - expected)) < 1e-3 < np.abs(expected).max()


def saliency(model: Any, row: dict[str, torch.Tensor], block: str, signs: torch.Tensor) -> np.ndarray:
    """Returns how far v z moves with each token as the mean one, by finite differences, for one row without padding."""
    with torch.no_grad():
        seen: list[torch.Tensor] = []
        module = model.get_submodule(block)
        handle = module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(**row)
        handle.remove()
        states_LD, moved = seen[0][0].double(), []
        for token in range(len(states_LD)):
            values = []
            for step in (1e-4, -1e-4):
                changed = states_LD.clone()
                changed[token] += step * (states_LD[token] - states_LD.mean(0))
                handle = module.register_forward_pre_hook(lambda module, args, changed=changed: (changed[None], *args[1:]))
                logits_C = model(**row).logits[0]
                handle.remove()
                values.append(float(((logits_C - logits_C.mean()) * signs).sum()))
            moved.append((values[0] - values[1]) / 2e-4)
    return np.array(moved)


def test_significance_is_the_regression_written_out(make_model: Callable[..., Any]) -> None:
    model = make_model("bert", num_hidden_layers=2).double()
    lengths, random = (9, 5, 7, 2, 1, 8), np.random.default_rng(0)
    rows = [torch.from_numpy(random.integers(5, 20, length)) for length in lengths]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batches = [
        Batch({"input_ids": ids[part], "attention_mask": mask[part]}, torch.zeros(0), np.arange(0), 0, 1)
        for part in (slice(4), slice(4, 6))
    ]
    found = significance(model, batches, "text-classification", KEY, seed=3)
    generator, signs = torch.Generator().manual_seed(3), []
    for count in (4, 2):  # rows of each batch
        signs += list(torch.stack([torch.randint(0, 2, (count, 2), generator=generator) * 2 - 1 for _ in range(PROBES)], dim=1))
    for number, name in enumerate(blocks_of(model, KEY)):
        features_ND, targets = [], []
        for row, signs_PC in zip(rows, signs, strict=True):
            given = {"input_ids": row[None], "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
            squares = [saliency(model, given, name, signs_C) ** 2 for signs_C in signs_PC]
            moved = np.sqrt(np.mean(squares, axis=0))[1:]
            states: list[torch.Tensor] = []
            handle = model.get_submodule(name).register_forward_pre_hook(lambda module, args, states=states: states.append(args[0]))
            model(**given)
            handle.remove()
            if len(moved):
                features_ND += list(states[0][0, 1:].detach().numpy())
                targets += list(np.log(np.minimum(moved / moved.mean(), HIGHEST) + FLOOR))
        x_ND = np.array(features_ND)
        strength = RIDGE * x_ND.var(0).mean() * len(x_ND)
        expected = Ridge(alpha=strength).fit(x_ND, targets).coef_
        np.testing.assert_allclose(found[number].numpy(), expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def test_tokens_that_move_the_answer_are_found(make_model: Callable[..., Any]) -> None:
    """A BERT that answers by the presence of one word alone, seen through mean attention: that word comes first in every row."""
    model = make_model("bert", num_hidden_layers=2)
    with torch.no_grad():
        for block in blocks_of(model, KEY).values():
            for name, parameter in block.named_parameters():
                if "query" in name or "key" in name or "output.dense" in name or "intermediate" in name:
                    parameter.mul_(0.01)
        first = model.bert.encoder.layer[0]
        first.attention.self.value.weight.zero_()
        word = model.bert.embeddings.word_embeddings.weight[19]
        first.attention.self.value.weight[0] = 5 * (word - model.bert.embeddings.word_embeddings.weight[5:19].mean(0))
        first.attention.output.dense.weight[:, 0] = torch.randn(16, generator=torch.Generator().manual_seed(0))
    random = np.random.default_rng(1)
    ids = torch.from_numpy(random.integers(5, 19, (64, 10)))
    places = torch.from_numpy(random.integers(1, 10, 64))
    ids[torch.arange(64), places] = 19
    batch = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.zeros(0), np.arange(0), 0, 1)
    weights = significance(model, [batch], "text-classification", KEY)
    scores = model.bert.embeddings(ids) @ weights[0]
    assert float((scores[:, 1:].argmax(1) + 1 == places).float().mean()) > 0.95


@pytest.fixture(scope="module")
def left(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model that half of the tokens leave behind the first of three layers, and half of the others behind the second."""
    folder, out = checkpoint("bert"), tmp_path_factory.mktemp("left")
    stage = Prune(tokens=(0.5, 0.25), **{**BRIEF, "recover": None})
    small_runs.pruned(stage, folder, context_of(folder, out / "scratch", Told()), out / "left")
    return out / "left"


def test_a_model_whose_tokens_left_is_pruned_from_all_of_them(
    left: Path, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    folder, first = checkpoint("bert"), load(left)
    stage = Prune(tokens=(0.75,), **{**BRIEF, "recover": None})
    again, figures = small_runs.pruned(stage, left, make_context(folder), tmp_path / "again")
    assert figures["before"]["tokens"] == (0.5, 0.25, 0.25)
    assert Structure.of(again, KEY).sizes.tokens == (0.75, 0.75, 0.75)
    torch.testing.assert_close(again.get_buffer("bert.encoder.layer.0.significance"), first.get_buffer("bert.encoder.layer.0.significance"))


@pytest.mark.first(1)
@pytest.mark.parametrize("granularity", [["heads", "ffn"], ["layers"], ["hidden"]])
def test_tokens_leave_what_is_pruned_after_them_as_before(
    granularity: list[str], left: Path, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    folder = checkpoint("bert")
    brief = {"sparsity": 0.34, "granularity": granularity, "rows": 16, "recover": None, "multiple_of": 8}
    stage = Prune.model_validate(brief)
    again, figures = small_runs.pruned(stage, left, make_context(folder), tmp_path / "again")
    plain, _ = small_runs.pruned(stage, folder, make_context(folder), tmp_path / "plain")
    kept = figures["layers"]
    assert Structure.of(again, KEY).sizes.tokens == tuple((0.5, 0.25, 0.25)[layer] for layer in kept)
    assert figures["sparsity"] > 0.2
    own = {name: value for name, value in again.state_dict().items() if not name.endswith("significance")}
    for name, value in plain.state_dict().items():  # the units were chosen, and what stays was updated, on all tokens
        torch.testing.assert_close(own[name], value)


def test_latency_of_a_model_whose_tokens_left_is_refused(left: Path, make_context: Callable[..., Context]) -> None:
    stage = Prune.model_validate({"measure": "latency", "sparsity": 0.3, "recover": None})
    with raises_problem("measure", "latency", "incoming model", "give macs"):
        stage.check(load(left).config, None, make_context())
