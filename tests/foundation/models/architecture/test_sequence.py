"""Processes that share layers and tokens have the logits and gradients of the whole model; what mixes tokens is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.core.target import Checkpointing
from foundation.labels.tasks import Task
from foundation.models.architecture.sequence import check_sequence, reader_of, share_tokens
from foundation.models.architecture.shapes import auto_class, on_meta
from foundation.models.architecture.split import Split, split_of
from foundation.models.layers.conv1d import with_linears
from foundation.models.layers.token_shares import Group
from foundation.models.library import with_class
from foundation.models.size import inputs_of
from foundation.training.recompute import recomputed
from tests.foundation.models.architecture.test_split import config_of, share
from tests.threads import together

KINDS = ("bert", "distilbert", "vit", "gpt2", "gpt_neox", "llama", "modernbert", "gptj", "qwen2", "gemma2", "cohere", "glm4")
SIZES: dict[str, dict[str, Any]] = {
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2},
    "glm4": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
}


def whole_model(kind: str) -> tuple[Any, Task]:
    from transformers import CONFIG_MAPPING

    if kind == "gptj":
        task: Task = "text-generation"
        config = with_class(CONFIG_MAPPING[kind](**SIZES[kind]), task)
    else:
        config, task = config_of(kind, **SIZES.get(kind, {}))
    config.use_cache = False
    torch.manual_seed(0)
    model = with_linears(auto_class(task, config).from_config(config)).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model, task


def rows(model: Any, task: Task, length: int) -> dict[str, Tensor]:
    """Random rows, one of them with padding at its end."""
    features = {name: value.repeat(2, *[1] * (value.ndim - 1)) for name, value in inputs_of(model.config, task, length).items()}
    for name in features.keys() & {"pixel_values"}:
        features[name] = torch.randn(features[name].shape, dtype=torch.float64)
    if "input_ids" in features:
        features["input_ids"] = torch.randint(3, 60, features["input_ids"].shape)
        features["attention_mask"][1, length // 2 + 1 :] = 0
    return features


def compared(kind: str, processes: int, lengths: tuple[int, ...], checkpointing: Checkpointing = "none") -> None:
    """Compares the logits of several passes, and the gradients of one backward pass through all of them."""
    model, task = whole_model(kind)
    batches = [rows(model, task, length) for length in lengths]
    expected = [model(**features).logits for features in batches]
    torch.manual_seed(1)
    upstream = [torch.randn_like(logits) for logits in expected]
    torch.autograd.backward(expected, upstream)
    split = split_of(model, processes, "model")
    gradients = copy.deepcopy(model)
    for name, parameter in gradients.named_parameters():
        found = model.get_parameter(name).grad
        parameter.data = torch.zeros_like(parameter) if found is None else found
    shares = [share(model, split, rank).double() for rank in range(processes)]

    def run(rank: int) -> list[Tensor]:
        import torch.distributed as dist

        share_tokens(shares[rank], split, Group(processes, rank, dist.group.WORLD))
        with recomputed(shares[rank], checkpointing, "model"):
            found = [shares[rank](**features).logits for features in batches]
            torch.autograd.backward(found, upstream)
        return [logits.detach() for logits in found]

    for rank, found in enumerate(together(processes, run)):
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-6, atol=1e-6)
        wanted_of = dict(share(gradients, split, rank).named_parameters())
        rounds = kind in ("gemma2", "cohere")  # norms compute in float32
        for name, parameter in shares[rank].named_parameters():
            assert parameter.grad is not None or not wanted_of[name].any(), name
            if parameter.grad is not None:
                torch.testing.assert_close(
                    parameter.grad, wanted_of[name].data, rtol=1e-3 if rounds else 1e-7, atol=1e-5 if rounds else 1e-8
                )


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_the_whole_model(kind: str) -> None:
    compared(kind, 2, (7,))


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("length", [1, 5, 8])
def test_four_processes_share_any_number_of_tokens(kind: str, length: int) -> None:
    compared(kind, 4, (length,))


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_each_pass_keeps_its_own_number_of_tokens(checkpointing: Checkpointing) -> None:
    """The second pass is over when the blocks of the first are run again."""
    compared("llama", 2, (7, 4), checkpointing)


def test_the_module_that_reads_is_the_attention_or_what_holds_the_first_layers() -> None:
    def readers(kind: str) -> list[str]:
        config, _ = config_of(kind)
        split = split_of(on_meta(config), 2, "model")
        first = [region for region in split.regions if ".0." in region[1]]
        stem = "bert.encoder.layer.0" if kind == "bert" else "model.layers.0"
        return [reader_of(columns, split, [stem]).removeprefix(stem) for columns, _ in first]

    assert readers("bert") == [".attention.self", ".intermediate.dense"]
    assert readers("llama") == [".self_attn", ".mlp"]
    beside = Split(2, {}, (), ((("block.up", "block.gate"), "block.down"),), {})
    assert reader_of(("block.up", "block.gate"), beside, ["block"]) == "block.up"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("opt", {}, "does not run on shares of its tokens (a Linear reads states of the shape (4, 32), without an axis of tokens)"),
        ("bart", {}, "has two stacks of blocks, one of which reads the tokens of the other"),
        ("beit", {}, "leaves out blocks at random (drop_path_rate: 0.1), each process others"),
    ],
)
def test_what_cannot_be_shared_is_told_in_one_line(kind: str, changes: dict[str, Any], message: str) -> None:
    from transformers import CONFIG_MAPPING

    if kind == "opt":
        config, task = config_of(kind, word_embed_proj_dim=32)
    else:
        task = "text-classification" if kind == "bart" else "image-classification"
        usual = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        two = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 64, "pad_token_id": 1, "eos_token_id": 2}
        image = {**usual, "image_size": 8, "patch_size": 4}
        config = with_class(CONFIG_MAPPING[kind](**({**two, **heads} if kind == "bart" else image)), task)
    with pytest.raises(InputError, match=re.escape(f"stages.finetune: parallel.sequence: true given; this {kind} {message}")) as raised:
        check_sequence(config, task, 8, 2, "stages.finetune")
    assert str(raised.value).endswith("give sequence: false")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("module", "refused"), [(nn.Conv1d(32, 32, 3), True), (nn.BatchNorm1d(32), True), (nn.LayerNorm(32), False), (nn.Dropout(0.1), False)]
)
def test_what_may_mix_tokens_between_layers_is_refused(module: nn.Module, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert.modeling_bert import BertOutput

    original: Any = BertOutput.__init__

    def with_module(self: Any, config: Any) -> None:
        original(self, config)
        self.dropout = module

    config, task = config_of("bert")
    split = split_of(on_meta(config), 2, "model")
    monkeypatch.setattr(BertOutput, "__init__", with_module)
    monkeypatch.setattr("foundation.models.architecture.sequence.split_of", lambda *_: split)
    monkeypatch.setattr("foundation.models.architecture.sequence._step_of_share", lambda *_, **__: None)
    if not refused:
        check_sequence(config, task, 8, 2, "finetune")
        return
    with pytest.raises(InputError, match=rf"has bert\.encoder\.layer\.0\.output\.dropout \({type(module).__name__}\) between the layers"):
        check_sequence(config, task, 8, 2, "finetune")


def test_a_column_layer_that_reads_something_else_is_no_silent_error() -> None:
    model, task = whole_model("bert")
    split = split_of(model, 2, "model")
    shared: Any = share(model, split, 0).double()
    share_tokens(shared, split, Group(2))
    reader = shared.bert.encoder.layer[0].attention.self
    reader.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    with pytest.raises(ValueError, match=r"attention\.self\.(key|query|value) reads something else"):
        shared(**rows(model, task, 8))
