"""Processes that share the rows of a batch drop what one process drops, whatever draws and wherever rows stand in a tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from foundation.machine.parallel import Team
from foundation.training.processes.dealing import Dealing
from foundation.training.processes.row_draws import RowDraws

TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 3}
GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24, "num_labels": 3, "pad_token_id": 0}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.3}
IMAGE = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 3}
SWIN = {**IMAGE, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "drop_path_rate": 0.5, "hidden_dropout_prob": 0.3}
CONV = {
    "num_channels": 1,
    "patch_size": 2,
    "hidden_sizes": [8, 16],
    "depths": [1, 2],
    "num_stages": 2,
    "drop_path_rate": 0.5,
    "num_labels": 3,
}
SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
}
SPEECH |= {"conv_stride": [2, 2], "num_feat_extract_layers": 2, "apply_spec_augment": False, "vocab_size": 12, "num_conv_pos_embeddings": 4}
SPEECH |= {"num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.3, "layerdrop": 0.3, "final_dropout": 0.2, "feat_proj_dropout": 0.2}
ROWS = 7
MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, hidden_dropout_prob=0.3)),
    "distilbert": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=4, hidden_dim=24, dropout=0.3, num_labels=3)
    ),
    "deberta": lambda: transformers.DebertaV2ForSequenceClassification(
        transformers.DebertaV2Config(**TEXT, hidden_dropout_prob=0.3, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "gpt2": lambda: transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**GPT, resid_pdrop=0.3, embd_pdrop=0.3)),
    "opt": lambda: transformers.OPTForSequenceClassification(  # flattens rows and tokens
        transformers.OPTConfig(
            **{**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}, dropout=0.3
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**{**TEXT, **IMAGE}, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    ),
    "swin": lambda: transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN)),
    "convnext": lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**CONV)),
    "wav2vec2": lambda: transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SPEECH)),
    "eager": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**TEXT, hidden_dropout_prob=0.0, attn_implementation="eager")
    ),
}


def features(kind: str, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind in ("vit", "swin", "convnext"):
        return {"pixel_values": torch.randn(count, 1, 8, 8, generator=generator)}
    if kind == "wav2vec2":
        return {"input_values": torch.randn(count, 64, generator=generator)}
    ids = torch.randint(3, 40, (count, 9), generator=generator)
    ids[:, 6:] = torch.where(torch.arange(count)[:, None] % 2 == 0, 0, ids[:, 6:])
    found = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    return found | ({"decoder_input_ids": ids[:, :5]} if kind == "t5" else {})


def answers(model: nn.Module, given: dict[str, Tensor], draws: RowDraws | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits, a gradient, and the state of the generator behind them."""
    torch.manual_seed(5)
    model.zero_grad()
    with draws or nullcontext():
        logits = model(**given).logits
        logits.square().sum().backward()
    gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    return logits.detach(), gradient, torch.get_rng_state()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("processes", [2, 3])
def test_every_process_drops_what_one_process_drops_in_its_rows(kind: str, processes: int) -> None:
    torch.manual_seed(0)
    model, given = MODELS[kind]().train(), features(kind, ROWS)
    with torch.no_grad():  # larger than drawn, so that what is dropped counts
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    expected, whole, state = answers(model, given)
    assert not torch.allclose(expected, model.eval()(**given).logits, atol=1e-3), "something is dropped"
    model.train()
    total = torch.zeros_like(whole)
    for rank in range(processes):
        own = np.arange(ROWS)[rank::processes]
        part = {name: value[own] for name, value in given.items()}
        draws = RowDraws().of(own, np.arange(ROWS))
        draws.widths = {value.shape[1] for value in given.values() if value.ndim == 2}
        found, gradient, after = answers(model, part, draws)
        torch.testing.assert_close(found, expected[own], atol=1e-5, rtol=1e-4)
        assert torch.equal(after, state)
        total += gradient
    torch.testing.assert_close(total, whole, atol=1e-4, rtol=1e-3)


def test_what_has_no_rows_is_the_same_everywhere_and_generators_that_are_given_are_left_alone() -> None:
    draws = RowDraws().of(np.array([1, 3, 5]), np.arange(6))
    torch.manual_seed(0)
    expected = torch.rand(4), torch.rand([]), torch.rand(3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    with draws:
        found = torch.rand(4), torch.rand([]), torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert all(map(torch.equal, found, expected))


def test_a_process_without_rows_draws_as_many_numbers() -> None:
    torch.manual_seed(0)
    torch.rand(1, 8)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with RowDraws().of(np.array([9]), np.array([4])):
        torch.rand(1, 8)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("sizes", [[1] * 11, [2, 3, 2, 1, 3]])
@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_rows_that_are_taken_at_once_are_those_of_all_processes(sizes: list[int], micro_batch_size: int | None, processes: int) -> None:
    indices = np.arange(sum(sizes))
    dealt = [Dealing(np.array(sizes), 12, micro_batch_size, Team(rank=rank, size=processes)) for rank in range(processes)]
    at_once = dealt[0].at_once(indices)
    parts = [each.parts(indices) for each in dealt]
    assert all(len(each) == len(at_once) for each in parts)
    for number, every in enumerate(at_once):
        assert sorted(row for each in parts for row in each[number].tolist()) == every.tolist()
