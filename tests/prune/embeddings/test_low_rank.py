"""Embeddings in low rank: the factors next to numpy's, the model that gets them, its checkpoint, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.architecture.attention import probe
from foundation.models.architecture.shapes import auto_class, on_meta
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.layers.conv1d import with_linears
from foundation.models.layers.low_rank_embedding import LowRankEmbedding, low_rank_tables, words_of
from foundation.models.library import with_class
from foundation.models.size import count
from foundation.stage.context import Context
from prune.embeddings.low_rank import check_rank, config_in_low_rank, factors, in_low_rank, occurrences
from prune.prune import Prune
from tests.problems import raises_problem
from tests.prune.small_runs import pruned

pytestmark = pytest.mark.whole

KEY = "stages.prune"
RANK = 5
ALONE: dict[str, Any] = {"sparsity": 0, "recover": None, "rows": 16}
QUICK: dict[str, Any] = {"method": "magnitude", "allocation": "uniform", "multiple_of": 4, "rows": 16, "recover": None}


def table_of(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns a table and how often its tokens occur: many never, few often."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_normal((rows, width))).float(), torch.from_numpy(random.zipf(1.5, rows) - 1.0)


@given(st.integers(2, 12), st.integers(2, 9), st.integers(0, 2**20), st.data())
def test_factors_are_those_of_a_weighted_svd(rows: int, width: int, seed: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, width))
    table, counts = table_of(rows, width, seed)
    root = np.sqrt(counts.numpy() + 1)[:, None]
    left, values, right = np.linalg.svd(root * table.double().numpy(), full_matrices=False)
    values[rank:] = 0
    expected = (left * values) @ right / root
    found = factors(table, counts + 1, rank)
    assert (found.table_VR.shape, found.projection_DR.shape) == ((rows, rank), (width, rank))
    np.testing.assert_allclose((found.table_VR @ found.projection_DR.T).numpy(), expected, atol=1e-9)
    error = np.linalg.norm(root * (table.double().numpy() - expected)) / np.linalg.norm(root * table.double().numpy())
    assert found.error == pytest.approx(error, abs=1e-9)


def test_the_error_falls_with_the_rank() -> None:
    table, counts = table_of(60, 12, 0)
    errors = [factors(table, counts + 1, rank).error for rank in range(1, 13)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.5
    assert errors[-1] < 1e-12
    narrow = table[:, :4] @ torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    assert factors(narrow, counts + 1, 4).error < 1e-6 < factors(narrow, counts + 1, 3).error


def test_frequent_tokens_stay_closer_than_with_equal_weights() -> None:
    table, _ = table_of(80, 12, 3)
    counts = torch.where(torch.arange(80) < 8, 1000.0, 0.0).double()

    def distance(weights: Tensor) -> Tensor:
        found = factors(table, weights, 6)
        return (table.double() - found.table_VR @ found.projection_DR.T).norm(dim=1)

    weighted, equal = distance(counts + 1), distance(torch.ones(80).double())
    assert weighted[:8].max() < 0.5 * equal[:8].min()
    assert weighted[8:].norm() > equal[8:].norm()


def test_a_row_of_zeros_stays_one() -> None:
    table, counts = table_of(20, 6, 0)
    table[3] = 0
    assert not factors(table, counts + 1, 2).table_VR[3].any()
    nothing = factors(torch.zeros(4, 3), torch.ones(4), 2)
    assert (nothing.error, bool(nothing.table_VR.any())) == (0.0, False)


def test_occurrences_are_those_of_the_tokens_without_padding(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("bert")
    prepared = Checkpoint(folder).preprocessor("text-classification", 6, Target())
    rows = ["very good film", "good", "very very very very very very very"]  # [CLS] x 3, [SEP] x 3; the last one is cut
    found = occurrences(rows, prepared, 30)
    names = dict(enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"]))
    assert (len(found), {names[token]: int(found[token]) for token in names}) == (30, {"[PAD]": 0, "[UNK]": 0, "[CLS]": 3, "[SEP]": 3})
    words = prepared.tokenizer.get_vocab()  # type: ignore[union-attr]
    assert {word: int(found[words[word]]) for word in ("very", "good", "film", "bad")} == {"very": 5, "good": 2, "film": 1, "bad": 0}


def low(model: Any, rank: int = RANK) -> Any:
    return in_low_rank(model, torch.arange(model.config.vocab_size).double(), rank, KEY)[0]


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", ["bert", "llama", "distilbert", "roberta"])
def test_it_computes_what_the_model_with_the_product_as_its_table_does(
    kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model(kind)
    before = copy.deepcopy(model.state_dict())
    small, figures = in_low_rank(model, torch.arange(20).double(), RANK, KEY)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    [(name, words)] = low_rank_tables(small).items()
    width = words.embedding_dim
    assert figures["parameters"] == {"before": 20 * width, "after": RANK * (20 + width)}
    assert figures["rank"] == RANK
    found = factors(before[f"{name}.weight"], torch.arange(20).double() + 1, RANK)
    assert figures["relative_error"] == found.error
    torch.testing.assert_close(words.whole(), found.table_VR @ found.projection_DR.T, atol=1e-6, rtol=1e-5)
    whole: Any = words_of(model)
    whole.weight.data.copy_(words.whole())
    features = make_features(kind)
    with torch.no_grad():
        torch.testing.assert_close(small(**features).logits, model(**features).logits, atol=1e-4, rtol=1e-4)
    assert small.config.vocab_size == 20
    again = low(small, 3)
    assert low_rank_tables(again)[name].table.weight.shape == (20, 3)


def test_a_row_of_padding_gets_no_gradient(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    model.bert.embeddings.word_embeddings.weight.data[0] = 0
    small = low(model)
    words = small.bert.embeddings.word_embeddings
    assert words.padding_idx == 0
    small(input_ids=torch.tensor([[5, 6, 0]])).logits.sum().backward()
    assert not words.table.weight.grad[0].any()
    assert words.table.weight.grad[5].any()
    assert not words(torch.tensor([0])).any()


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_checkpoint_is_read_as_it_was_written(kind: str, make_model: Callable[..., Any], tmp_path: Path) -> None:
    small = low(make_model(kind))
    save(small, tmp_path, tmp_path, "In low rank")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["compress_architecture"]["embedding_rank"] == RANK
    again: Any = load(tmp_path)
    assert again.state_dict().keys() == small.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in small.state_dict().items())
    rows = probe(small, torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again(**rows).logits, small(**rows).logits, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"load it with compress.api.load_checkpoint"):
        transformers.AutoModel.from_pretrained(tmp_path)
    config = Checkpoint(tmp_path, KEY).config
    [words] = low_rank_tables(on_meta(config)).values()
    assert words.table.weight.shape == (20, RANK)
    task = "text-generation" if kind == "llama" else "text-classification"
    assert count(config, task, 8).parameters == sum(parameter.numel() for parameter in small.parameters())  # type: ignore[arg-type]


def test_a_model_that_draws_its_table_itself_is_read(tmp_path: Path) -> None:
    """ModernBERT looks for the weight of its table when it is loaded."""
    config = transformers.ModernBertConfig(**SIZES, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
    small = low(model_of(config, "text-classification"))
    save(small, tmp_path, tmp_path, "In low rank")
    again = load(tmp_path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in small.state_dict().items())


def test_a_checkpoint_of_a_model_without_such_a_table_is_refused(make_model: Callable[..., Any], tmp_path: Path) -> None:
    save(low(make_model("bert")), tmp_path, tmp_path, "In low rank")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["compress_architecture"]["embedding_rank"] = -1
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="embedding_rank"):
        load(tmp_path)


def test_channels_are_of_the_projection_and_tokens_of_the_table(make_model: Callable[..., Any]) -> None:
    small = low(make_model("bert"))
    structure, name = Structure.of(small, KEY), "bert.embeddings.word_embeddings"
    assert structure.vocabulary == {(f"{name}.table.weight", 0)}
    assert {axis for axis in structure.residual if axis[0].startswith(name)} == {(f"{name}.projection.weight", 0)}
    assert structure.sizes.embedding_rank == RANK
    electra = transformers.ElectraConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=24, vocab_size=20, embedding_size=12
    )
    task = "text-classification"
    small = low(with_linears(auto_class(task).from_config(with_class(electra, task))).eval())
    inside = {axis for axis in Structure.of(small, KEY).residual if "embeddings" in axis[0]}
    assert {("electra.embeddings_project.weight", 0), ("electra.embeddings_project.bias", 0)} <= inside
    assert not any("word_embeddings" in axis[0] for axis in inside)


def of_few_words(context: Context) -> Context:
    """Returns the context with train rows of some words of the vocabulary alone."""
    rows = [("very good film", "bad movie", "poor dull film film")[number % 3] for number in range(48)]
    return replace(context, data=replace(context.data, train=replace(context.data.train, rows=rows)))


@pytest.mark.first(1)
@pytest.mark.parametrize("units", [["layers", "vocabulary"], ["heads", "ffn"], ["hidden"]], ids=str)
def test_the_stage_and_a_stage_after_it(
    units: list[str], checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    folder = checkpoint("bert")
    context = of_few_words(make_context(folder))
    model, figures = pruned(Prune(**ALONE, embedding_rank=RANK), folder, context, tmp_path / "low")
    assert figures["sparsity"] == 0
    assert figures["embeddings"]["parameters"] == {"before": 320, "after": 180}
    counts = occurrences(context.data.train.rows, context.preprocessor(folder), 20)
    plain: Any = load(folder)
    table = plain.bert.embeddings.word_embeddings.weight
    assert figures["embeddings"]["relative_error"] == pytest.approx(factors(table, counts + 1, RANK).error)
    assert figures["embeddings"]["relative_error"] < 0.9 * factors(table, torch.ones(20), RANK).error
    stage = Prune(**{**QUICK, "granularity": units, "max_unknown": 1})
    after, more = pruned(stage, tmp_path / "low", context, tmp_path / "after")
    assert more["sparsity"] > 0.3
    sizes = Structure.of(after, KEY).sizes
    assert sizes.embedding_rank == RANK
    assert "embeddings" not in more
    if "vocabulary" in units:
        assert after.bert.embeddings.word_embeddings.table.weight.shape == (sizes.vocabulary, RANK)
        assert sizes.vocabulary < model.config.vocab_size


def test_together_with_units_and_tokens(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    folder = checkpoint("bert")
    stage = Prune(**{**QUICK, "granularity": ["heads", "ffn", "vocabulary"], "max_unknown": 1}, embedding_rank=RANK)
    model, figures = pruned(stage, folder, of_few_words(make_context(folder)), tmp_path / "out")
    rows = figures["after"]["vocabulary"]
    assert rows == figures["vocabulary"]["vocabulary"] < 20
    assert model.bert.embeddings.word_embeddings.table.weight.shape == (rows, RANK)
    assert figures["embeddings"]["parameters"] == {"before": 16 * rows, "after": RANK * (16 + rows)}
    assert figures["sparsity"] > 0.3
    planned = stage.config_after(Checkpoint(folder).config)
    assert planned.compress_architecture["embedding_rank"] == RANK


def test_vocabulary_alone_recovers_what_the_rank_costs() -> None:
    assert Prune(granularity=("vocabulary",)).recover is None
    stage = Prune(granularity=("vocabulary",), embedding_rank=8)
    assert stage.sparsity == 0
    assert stage.recover is not None
    assert "embedding_rank" not in Prune().model_dump()
    with pytest.raises(ValidationError, match="embedding_rank: given together with family"):
        Prune(family=(2, 3), embedding_rank=8)


def test_width_may_not_fall_below_the_rank(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    config = Checkpoint(checkpoint("bert")).config
    stage = Prune(**{**QUICK, "granularity": ["hidden"]}, embedding_rank=12)
    with raises_problem("prune.embedding_rank", "12", "channels", "lower"):
        stage.check(config, config, make_context())


def model_of(config: Any, task: Any) -> Any:
    """Returns the model of a config with random weights."""
    with torch.random.fork_rng():
        return with_linears(auto_class(task).from_config(with_class(config, task))).eval()


SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
REFUSED: dict[str, tuple[Any, str, int, tuple[str, ...]]] = {
    "tied": (transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20), "text-generation", 4, ("lm_head.weight", "tied")),
    "two sides": (transformers.T5Config(**T5, decoder_start_token_id=0), "text-to-text", 4, ("two sides", "t5")),
    "images": (
        transformers.ViTConfig(**{**SIZES, "image_size": 8, "patch_size": 4}),
        "image-classification",
        4,
        ("vit", "no table of tokens"),
    ),
    "scaled": (
        transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False),
        "text-generation",
        4,
        ("Gemma2TextScaledWordEmbedding",),
    ),
    "no lower rank": (transformers.BertConfig(**SIZES), "text-classification", 16, ("16", "give 1 to 15")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_line(name: str) -> None:
    config, task, rank, parts = REFUSED[name]
    with raises_problem("prune.embedding_rank", str(rank), *parts) as caught:
        check_rank(model_of(config, task), rank, KEY)
    assert len(str(caught.value).splitlines()) == 1
    with raises_problem("prune.embedding_rank", str(rank), *parts):
        config_in_low_rank(with_class(config, task), rank, KEY)  # type: ignore[arg-type]


def test_images_are_refused_before_a_run(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    config = Checkpoint(checkpoint("bert")).config
    with raises_problem("prune.embedding_rank", "image-classification", "no texts"):
        Prune(**ALONE, embedding_rank=4).check(config, config, replace(make_context(), task="image-classification"))


def test_a_head_of_its_own_stays_whole(make_model: Callable[..., Any], tmp_path: Path) -> None:
    """The config of the first one ties what its weights do not."""
    model = make_model("gpt2", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    small = low(model)
    assert torch.equal(small.lm_head.weight, model.lm_head.weight)
    assert small.config.tie_word_embeddings is False
    save(small, tmp_path, tmp_path, "In low rank")
    again: Any = load(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert isinstance(again.transformer.wte, LowRankEmbedding)
