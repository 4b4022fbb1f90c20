"""Stages of a pipeline: the balance of blocks, stages one after another against the whole model, who holds which weights, and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foundation.core.errors import InputError
from foundation.models.architecture.stages import Stages, balanced, check_stages, run_stage, stages_of

SIZES: Any = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: Any = {name: value for name, value in SIZES.items() if name != "vocab_size" and not name.endswith("token_id")}
NARROW: Any = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5: Any = {**NARROW, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 4, "num_heads": 4}
MODELS: dict[str, Any] = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
    "deberta-v2": lambda: transformers.DebertaV2ForSequenceClassification(
        transformers.DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "mpnet": lambda: transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**NARROW, n_embd=16, n_layer=4, n_head=4)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama classifier": lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=4)),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1)),
}


def model_of(kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = MODELS[kind]().eval()
        with torch.no_grad():  # larger than drawn, so that a wrong mask shows
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.config.use_cache = False
    return model


def features_of(kind: str, rows: int = 3) -> dict[str, Tensor]:
    """Rows of different lengths, or images."""
    generator = torch.Generator().manual_seed(rows)
    if kind == "vit":
        return {"pixel_values": torch.randn(rows, 1, 8, 8, generator=generator)}
    mask = (torch.arange(9) < 9 - 2 * torch.arange(rows)[:, None]).long()
    return {"input_ids": torch.randint(3, 40, (rows, 9), generator=generator) * mask, "attention_mask": mask}


def in_stages(model: Any, stages: Stages, features: dict[str, Tensor]) -> Tensor:
    """The logits of all stages, one after another; the states are in the shape that is told beforehand."""
    blocks, states = [model.get_submodule(name) for name in stages.blocks], None
    for span in stages.spans:
        assert states is None or states.shape == stages.shape(features)
        states = run_stage(model.forward, blocks, span, stages.form, states, features)
    assert states is not None
    return states


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("count", [2, 4])
def test_stages_give_logits_and_gradients_of_the_whole_model(kind: str, count: int) -> None:
    model, features = model_of(kind), features_of(kind)
    stages = stages_of(model, features_of(kind, 2), count, "finetune")
    assert [number for span in stages.spans for number in span] == list(range(4))
    assert not any("forward" in module.__dict__ for module in model.modules())  # nothing is left behind
    whole = model(**features).logits
    assert torch.equal(in_stages(model, stages, features), whole)
    weight = torch.randn(whole.shape)
    (whole * weight).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    (in_stages(model, stages, features) * weight).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in expected.items())


@pytest.mark.parametrize("kind", MODELS)
def test_a_stage_needs_no_weights_but_those_that_it_holds(kind: str) -> None:
    model, features = model_of(kind), features_of(kind)
    stages, whole, states = stages_of(model, features, 3, "finetune"), model(**features).logits, None
    for stage, span in enumerate(stages.spans):
        part = model_of(kind)
        names = {id(parameter): name for name, parameter in part.named_parameters()}
        for module in part.modules():
            for child, parameter in list(module.named_parameters(recurse=False)):
                if stage not in stages.stages_with(names.get(id(parameter), "")):
                    nothing = nn.Parameter(torch.full((), torch.nan).expand(parameter.shape), requires_grad=False)
                    names[id(nothing)] = names.get(id(parameter), "")
                    setattr(module, child, nothing)
        blocks = [part.get_submodule(name) for name in stages.blocks]
        states = run_stage(part.forward, blocks, span, stages.form, states, features)
    assert torch.equal(states, whole)  # type: ignore[arg-type]


def test_weights_that_two_stages_read_are_held_by_both() -> None:
    shared = {kind: stages_of(model_of(kind), features_of(kind), 3, "finetune") for kind in ("gpt2", "llama", "deberta-v2", "bert")}
    assert shared["gpt2"].stages_with("transformer.wte.weight") == (0, 2)
    assert shared["llama"].stages_with("model.embed_tokens.weight") == (0, 2)
    assert shared["deberta-v2"].stages_with("deberta.encoder.rel_embeddings.weight") == (0, 1, 2)
    assert shared["bert"].stages_with("bert.embeddings.word_embeddings.weight") == (0,)
    assert shared["bert"].stages_with("classifier.bias") == (2,)
    assert shared["bert"].stages_with("bert.encoder.layer.1.output.dense.weight") == (1,)


def test_a_head_for_every_token_is_work_of_the_last_stage() -> None:
    config = transformers.GPT2Config(**{**NARROW, "vocab_size": 700}, n_embd=16, n_layer=8, n_head=4)  # a head of 3 blocks
    model = transformers.GPT2LMHeadModel(config).eval()
    assert stages_of(model, features_of("gpt2"), 2, "finetune").spans == (range(6), range(6, 8))
    assert stages_of(model_of("bert"), features_of("bert"), 2, "finetune").spans == (range(2), range(2, 4))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 20), st.integers(1, 8))
def test_no_cut_has_a_smaller_largest_stage(costs: list[int], head: int, count: int) -> None:
    count = min(count, len(costs))
    padded = [*costs[:-1], costs[-1] + head]
    every = (
        [sum(padded[first:last]) for first, last in itertools.pairwise((0, *cut, len(costs)))]
        for cut in itertools.combinations(range(1, len(costs)), count - 1)
    )
    spans = balanced(costs, head, count)
    assert [number for span in spans for number in span] == list(range(len(costs)))
    assert len(spans) == count
    assert all(spans)
    assert max(sum(padded[span.start : span.stop]) for span in spans) == min(max(sums) for sums in every)


def test_of_equal_cuts_the_first_stage_is_the_smallest() -> None:
    assert balanced([1] * 5, 0, 2) == (range(2), range(2, 5))


def test_what_wraps_a_block_runs_inside_of_a_stage() -> None:
    model, features, ran = model_of("bert"), features_of("bert"), []

    def wrapped(number: int, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(number)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return run

    stages, whole = stages_of(model, features, 2, "finetune"), model(**features).logits
    for number, block in enumerate(model.bert.encoder.layer):
        block.forward = wrapped(number, block.forward)
    logits = in_stages(model, stages, features)
    logits.sum().backward()
    assert torch.equal(logits, whole)
    assert ran == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        (transformers.T5Config(**T5), "token-classification", "hand on more than hidden states"),
        (transformers.XLNetConfig(**NARROW, d_model=16, n_layer=4, n_head=4, d_inner=24), "text-classification", "more than hidden states"),
        (transformers.AlbertConfig(**SIZES), "text-classification", "1 blocks for 4 layers"),
        (transformers.BertConfig(**{**SIZES, "num_hidden_layers": 1}), "text-classification", "1 blocks for 2 stages"),
    ],
)
def test_what_cannot_be_divided_is_told_before_the_run(config: Any, task: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^stages.finetune.*{message}"):
        check_stages(config, task, 8, 2, "stages.finetune")


@pytest.mark.parametrize(
    ("config", "task"),
    [
        (transformers.BertConfig(**SIZES), "text-classification"),
        (transformers.LlamaConfig(**SIZES), "text-generation"),
        (transformers.ModernBertConfig(**{**SIZES, "cls_token_id": 1, "sep_token_id": 2}), "text-classification"),
        (transformers.MixtralConfig(**SIZES, num_key_value_heads=2), "text-generation"),
    ],
)
def test_what_can_be_divided_is_not_refused(config: Any, task: Any) -> None:
    check_stages(config, task, 8, 2, "stages.finetune")


def test_stages_that_give_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("bert")
    layer = model.bert.encoder.layer[1]
    own, runs = layer.forward, [0]

    def counts(*args: Any, **kwargs: Any) -> Any:  # a state that no graph shows
        runs[0] += 1
        return own(*args, **kwargs) + runs[0]

    monkeypatch.setattr(layer, "forward", counts)
    with pytest.raises(InputError, match="does not give in stages what it gives whole"):
        stages_of(model, features_of("bert"), 2, "finetune")


def test_blocks_of_different_stages_do_not_share_weights() -> None:
    model = model_of("bert")
    layers = model.bert.encoder.layer
    layers[3].output.dense.weight = layers[0].output.dense.weight
    with pytest.raises(InputError, match=r"layer\.3\.output\.dense\.weight in several of its stages"):
        stages_of(model, features_of("bert"), 2, "finetune")
