"""Megatron's split: shares of threads that add up after every row layer are the whole model, for every kind of attention and FFN."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.labels.tasks import Task
from foundation.models.architecture.attention import probe
from foundation.models.architecture.shapes import auto_class, on_meta
from foundation.models.architecture.split import Split, check_split, shrink, split_of
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import with_class

USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
GROUPED = {**USUAL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES: Mapping[str, tuple[Task, dict[str, Any]]] = {
    "bert": ("text-classification", USUAL),
    "roberta": ("text-classification", USUAL),
    "distilbert": ("text-classification", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64}),
    "vit": ("image-classification", {**USUAL, "image_size": 8, "patch_size": 4}),
    "gpt2": ("text-generation", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, **TOKENS}),  # queries, keys, values in one
    "gpt_neox": ("text-generation", {**USUAL, **TOKENS}),  # the same head by head
    "llama": ("text-generation", GROUPED),
    "modernbert": ("text-classification", {**GROUPED, "cls_token_id": 1, "sep_token_id": 2}),  # FFN of two parts in one layer
    "opt": ("text-generation", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 64}),
}


def config_of(kind: str, **changes: Any) -> tuple[Any, Task]:
    from transformers import CONFIG_MAPPING

    task, sizes = FAMILIES.get(kind, ("text-generation", GROUPED))
    return with_class(CONFIG_MAPPING[kind](**{**sizes, **changes}), task), task


def share(model: nn.Module, split: Split, rank: int) -> nn.Module:
    """The weights of one process, cut out part by part."""
    own = shrink(copy.deepcopy(model), split)
    for name, parts in split.columns.items():
        for kind, whole in model.get_submodule(name).named_parameters():
            cut = [part.chunk(split.processes)[rank] for part in whole.split(list(parts))]
            getattr(own.get_submodule(name), kind).data = torch.cat(cut)
    for name in split.rows:
        layer: Any = own.get_submodule(name)
        layer.weight.data = model.get_submodule(name).weight.chunk(split.processes, dim=1)[rank].contiguous()  # type: ignore[operator]
        if layer.bias is not None:
            layer.bias.data = model.get_submodule(name).bias  # type: ignore[assignment]
    return own.eval()


class Sums:
    """Adds up what threads bring to the same place."""

    def __init__(self, count: int) -> None:
        self.brought: list[Tensor | None] = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def add(self, rank: int, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.brought[rank] = output if layer.bias is None else output - layer.bias
        self.barrier.wait()
        total = torch.stack([each for each in self.brought if each is not None]).sum(dim=0)
        self.barrier.wait()
        return total if layer.bias is None else total + layer.bias


@torch.no_grad()
def together(model: nn.Module, split: Split, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What each of several threads answers that have a share of every layer."""
    sums, answers = Sums(split.processes), dict[int, Tensor]()

    def work(rank: int) -> None:
        own = share(model, split, rank)
        for name in split.rows:
            own.get_submodule(name).register_forward_hook(lambda *given: sums.add(rank, *given))
        try:
            with torch.no_grad():
                answers[rank] = own(**inputs).logits
        except BaseException:
            sums.barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(split.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[rank] for rank in range(split.processes)]


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_shares_add_up_to_the_model(kind: str) -> None:
    config, task = config_of(kind)
    torch.manual_seed(0)
    model: Any = with_linears(auto_class(task, config).from_config(config)).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)  # biases are 0 at first
    split = split_of(model, 2, "x")
    assert len(split.rows) == 4  # attention and FFN of two blocks
    with torch.no_grad():
        inputs = probe(model)
        expected = model(**inputs).logits
        for answer in together(model, split, inputs):
            torch.testing.assert_close(answer, expected, atol=1e-4, rtol=1e-4)
    check_split(config, task, 8, 2, "x")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(2, 4))
def test_in_the_order_of_a_split_shares_are_contiguous(multiples: list[int], processes: int) -> None:
    parts = tuple(processes * multiple for multiple in multiples)
    split = Split(processes, {"layer": parts}, (), (), {})
    order = split.orders().get("layer", torch.arange(sum(parts)))
    pieces = torch.arange(sum(parts)).split(list(parts))
    for rank, own in enumerate(order.chunk(processes)):
        assert torch.equal(own, torch.cat([piece.chunk(processes)[rank] for piece in pieces]))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"num_attention_heads": 1}, r"block 0 has 1 heads \(nearest that divide: 2\), and 1 more; .*divisible_by: 2"),
        ("bert", {"intermediate_size": 45}, r"block 0 has 45 FFN neurons \(nearest that divide: 44 or 46\)"),
        ("llama", {"num_key_value_heads": 1}, r"block 0 has 1 key and value heads \(nearest that divide: 2\)"),
        ("qwen3", {"head_dim": 8}, r"this qwen3 has model\.layers\.0\.self_attn\.q_norm\.weight inside its attention"),
        ("mixtral", {"num_local_experts": 4}, r"this mixtral is a mixture of experts"),
        ("bloom", {"n_head": 4}, r"a share of the layers of this bloom does not run"),  # positions that depend on all heads
    ],
)
def test_what_cannot_be_shared_is_told_before_the_run(kind: str, changes: dict[str, Any], message: str) -> None:
    config, task = config_of(kind, **changes)
    with pytest.raises(InputError, match=rf"^stages\.finetune: parallel\.tensor: 2 given; .*{message}"):
        check_split(config, task, 8, 2, "stages.finetune")
    check_split(config, task, 8, 1, "stages.finetune")


def test_a_share_is_half_of_the_matrices_of_the_blocks() -> None:
    config, _ = config_of("llama")
    model = on_meta(config)
    split = split_of(model, 2, "x")
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    half = {name: parameter.numel() for name, parameter in shrink(model, split).named_parameters()}
    assert {name for name in whole if half[name] != whole[name]} == {f"{name}.weight" for name in (*split.columns, *split.rows)}
    assert all(2 * half[f"{name}.weight"] == whole[f"{name}.weight"] for name in (*split.columns, *split.rows))
