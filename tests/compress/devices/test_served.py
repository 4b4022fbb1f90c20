"""How models are divided for serving, against memory computed by hand from their published sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, GPT2Config, LlamaConfig, MixtralConfig

from compress.devices.activations import rows_of, without_memory
from compress.devices.served import (
    Bytes,
    Division,
    Load,
    Model,
    Plan,
    Precision,
    bytes_on_each,
    bytes_read,
    floor_ms,
    plan,
    stage_bytes,
    stages,
)
from compress.devices.spec import Devices, devices
from compress.devices.weights import Block, Weights, weights_of
from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS, Task
from foundation.models.architecture.blocks import block_of, blocks_of
from foundation.models.architecture.stages import stages_of
from foundation.models.forward import without_cache
from foundation.models.library import with_class
from foundation.models.size import count

GB = 10**9
BERT = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "architectures": ["BertForSequenceClassification"],
}  # fmt: skip
LLAMA_7B = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
LLAMA_70B = {
    **LLAMA_7B, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "bert-large": (BertConfig, BERT),
    "7B": (LlamaConfig, LLAMA_7B),
    "70B": (LlamaConfig, LLAMA_70B),
    "mixtral": (MixtralConfig, {"architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "intermediate_size": 14336}),
}
CHAT = Load(streams=8, length=4096)
ROWS = Load(streams=32, length=384)


@cache
def config(name: str) -> Any:
    kind, sizes = MODELS[name]
    return kind(**sizes)


def model(name: str, precision: Precision = "fp16") -> Model:
    return Model(config(name), precision, name != "bert-large")


def decided(name: str, given: str, precision: Precision = "fp16", load: Load | None = None) -> Plan:
    return plan(model(name, precision), load or (CHAT if name != "bert-large" else ROWS), devices(given))


def test_weights_are_those_of_the_published_sizes() -> None:
    """Matrices by hand: 4 h^2 + 2 h i for BERT, q, k, v, o and three of the FFN for Llama, 8 such FFNs for Mixtral."""
    found = {name: weights_of(config(name)) for name in MODELS}
    blocks = {name: weights.whole for name, weights in found.items()}
    assert blocks["bert-large"].matrices == 24 * (4 * 1024**2 + 2 * 1024 * 4096)
    bert = found["bert-large"]
    assert (bert.words, bert.tables, bert.entries, bert.before, bert.head) == (30522 * 1024, 514 * 1024, 3 * 1024, 2 * 1024, 0)
    assert bert.behind == 1024**2 + 1024 + 2 * 1024 + 2  # pooler and classifier
    assert blocks["7B"].matrices == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert (found["7B"].words, found["7B"].head, found["7B"].tied) == (32000 * 4096, 32000 * 4096, False)
    assert (blocks["7B"].rest, found["7B"].before, found["7B"].behind) == (2 * 32 * 4096, 0, 4096)
    assert blocks["70B"].matrices == 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert blocks["mixtral"].experts == 32 * 8 * 3 * 4096 * 14336
    assert blocks["mixtral"].matrices == 32 * (2 * 4096**2 + 2 * 4096 * 1024)
    assert blocks["mixtral"].rest == 32 * 8 * 4096 + 2 * 32 * 4096  # routers and norms
    assert [round(found[name].total / 1e9, 2) for name in ("7B", "70B", "mixtral")] == [6.74, 68.98, 46.7]


@pytest.mark.whole
@pytest.mark.parametrize("name", ["bert-large", "7B"])
def test_no_weight_is_lost(name: str) -> None:
    task = "text-generation" if name == "7B" else "text-classification"
    assert weights_of(config(name)).total == count(config(name), task, 8).parameters


def test_shared_weights_count_once() -> None:
    found = weights_of(GPT2Config(architectures=["GPT2LMHeadModel"]))
    assert (found.words, found.head, found.tied, found.tables) == (50257 * 768, 50257 * 768, True, 1024 * 768)
    assert found.total == 124_439_808


def test_bytes_of_7b_by_hand() -> None:
    """fp16: 2 bytes a weight; keys and values 2 * 32 layers * 32 heads * 128 * 2 bytes for each of 8 * 4096 tokens."""
    found = bytes_on_each(model("7B"), weights_of(config("7B")), CHAT, Division(1))
    matrices, vocabulary, rest = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 2 * 32000 * 4096, 65 * 4096
    cached, work = 2 * 32 * 32 * 128 * 2 * 8 * 4096, 2 * 8192 * (4 * 4096 + 2 * 11008) + 4 * 8 * 32000
    assert found == Bytes(2 * (matrices + vocabulary + rest), cached, work)
    int8 = bytes_on_each(model("7B", "int8"), weights_of(config("7B")), CHAT, Division(1))
    rows = 32 * (4 * 4096 + 2 * 11008 + 4096)
    assert int8.weights == matrices + 4 * rows + 2 * (vocabulary + rest)
    int4 = bytes_on_each(model("7B", "int4"), weights_of(config("7B")), CHAT, Division(1))
    assert int4.weights == matrices // 2 + 2 * matrices // 128 + 2 * (vocabulary + rest)


def test_bytes_of_a_divided_70b_by_hand() -> None:
    """8 heads of keys on 8 devices: one each; more devices than heads of keys hold copies."""
    weights = weights_of(config("70B"))
    found = bytes_on_each(model("70B"), weights, CHAT, Division(1, tensor=8))
    matrices, vocabulary = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672), 2 * 32000 * 8192
    assert found.weights == 2 * matrices // 8 + 2 * vocabulary // 8 + 2 * 161 * 8192
    assert found.cache == 2 * 80 * 1 * 128 * 2 * 8 * 4096
    assert bytes_on_each(model("70B"), weights, CHAT, Division(1, tensor=16)).cache == found.cache
    copies = 2 * 80 * 128 * 8192 // 2  # one of two devices has a head of keys and values for itself, and shares it with the other
    assert bytes_on_each(model("70B"), weights, CHAT, Division(1, tensor=16)).weights == found.weights // 2 + 2 * 161 * 4096 + 2 * copies
    turns = bytes_on_each(model("70B"), weights, CHAT, Division(1, pipeline=3))
    assert turns.cache == 2 * 27 * 8 * 128 * 2 * 8 * 4096  # 80 layers over 3 devices: 27, 27 and 26
    assert turns.weights == 2 * (27 * (matrices // 80 + 2 * 8192) + 32000 * 8192)  # the first, with all words


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "precision", "given", "expected"),
    [
        # 0.67 GB: replicas everywhere
        ("bert-large", "fp16", "1x24GB", Division(1)),
        ("bert-large", "int8", "4x24GB", Division(4)),
        ("bert-large", "fp16", "8x80GB,nvlink", Division(8)),
        # 13.5 GB of weights, 17.2 GB of keys and values: 31.3 GB, not in 21.6 but in 72
        ("7B", "fp16", "1x24GB", None),
        ("7B", "int4", "1x24GB", None),  # 4.0 and 17.2 GB: 21.9 of 21.6
        ("7B", "fp16", "4x24GB", Division(2, pipeline=2)),
        ("7B", "fp16", "4x24GB,nvlink", Division(2, tensor=2)),
        ("7B", "fp16", "8x80GB,nvlink", Division(8)),
        # 138 GB of weights, 10.7 GB of keys and values
        ("70B", "fp16", "1x80GB", None),
        ("70B", "int8", "1x80GB", None),
        ("70B", "int4", "1x80GB", Division(1)),  # 35.4 + 1.07 + 10.7 GB
        ("70B", "fp16", "4x80GB,nvlink", Division(1, tensor=4)),
        ("70B", "fp16", "8x80GB,nvlink", Division(2, tensor=4)),
        ("70B", "int8", "8x80GB,nvlink", Division(4, tensor=2)),
        ("70B", "fp16", "8x24GB,nvlink", Division(1, tensor=8)),
        ("70B", "fp16", "4x24GB", None),
        # 93 GB of weights, most of them of 8 experts; 4.3 GB of keys and values
        ("mixtral", "fp16", "1x80GB", None),
        ("mixtral", "int8", "1x80GB", Division(1)),
        ("mixtral", "fp16", "4x80GB,nvlink", Division(2, tensor=2, experts=2)),
        ("mixtral", "fp16", "8x24GB,nvlink", Division(1, tensor=8, experts=8)),
        ("mixtral", "int4", "4x24GB,nvlink", Division(2, tensor=2, experts=2)),
    ],
)
def test_choices(name: str, precision: Precision, given: str, expected: Division | None) -> None:
    found = decided(name, given, precision)
    assert found.division == expected, found.reasons
    assert (found.bytes.total <= devices(given).usable) == (expected is not None)
    if expected is not None:
        assert expected.replicas * expected.devices == devices(given).count
        smaller = [other for other in (1, 2, 4, 8) if other < expected.devices]
        for each in smaller:  # nothing smaller fits
            tried = Division(1, tensor=each) if expected.tensor > 1 else Division(1, pipeline=each)
            size = bytes_on_each(model(name, precision), weights_of(config(name)), CHAT if name != "bert-large" else ROWS, tried)
            assert size.total > devices(given).usable
    else:
        assert found.reasons[-1].startswith(("it does not fit", "it fits on none"))


def by_hand(name: str, tensor: int = 1, pipeline: int = 1) -> float:
    """Bytes on the fullest device in fp16 under `CHAT` or `ROWS`, from published sizes alone.

    Blocks: 4 h^2 + 2 h i weights in BERT; 2 h^2 + 2 h k + 3 h i in Llama and Mixtral (of each expert), k being the width of keys. Keys and
    values: 2 k a layer and token. Work: 4 h + 2 i numbers a token, and the logits of a step in float32.
    """
    layers, h, k, i, experts, words, rest = {
        "bert-large": (24, 1024, 1024, 4096, 1, 30522 + 512 + 2, 24 * (9 * 1024 + 4096) + 2 * 1024 + 1024**2 + 3 * 1024 + 2),
        "7B": (32, 4096, 4096, 11008, 1, 2 * 32000, 65 * 4096),
        "70B": (80, 8192, 1024, 28672, 1, 2 * 32000, 161 * 8192),
        "mixtral": (32, 4096, 1024, 14336, 8, 2 * 32000, 32 * 8 * 4096 + 65 * 4096),
    }[name]
    block = 4 * h**2 + 2 * h * i if name == "bert-large" else 2 * h**2 + 2 * h * k + 3 * experts * h * i
    held, tokens = -(-layers // pipeline), 32 * 384 if name == "bert-large" else 8192
    behind = 0 if name == "bert-large" else h  # the norm behind all blocks, which is on the last device with half of the tables
    weights = 2 * (block * held / tensor + words * h / (tensor * min(pipeline, 2)) + (rest - behind) * held / layers + behind)
    keys = 0 if name == "bert-large" else 2 * 2 * held * (k / tensor) * 8 * 4096
    logits = 0 if name == "bert-large" else 4 * 8 * 32000
    return weights + keys + 2 * tokens * (4 * h + 2 * i / tensor) + logits


CELLS = {
    # in fp16 each device takes, undivided: BERT-large 0.97 GB, 7B 31.3 GB, 70B 150.2 GB, Mixtral 98.4 GB; 21.6 or 72 GB of it may be used
    "bert-large": {"1x24GB": (1, 1), "4x24GB": (4, 1), "8x24GB": (8, 1), "1x80GB": (1, 1), "4x80GB": (4, 1), "8x80GB": (8, 1)},
    "7B": {"1x24GB": None, "4x24GB": (2, 2), "8x24GB": (4, 2), "1x80GB": (1, 1), "4x80GB": (4, 1), "8x80GB": (8, 1)},
    "70B": {"1x24GB": None, "4x24GB": None, "8x24GB": (1, 8), "1x80GB": None, "4x80GB": (1, 4), "8x80GB": (2, 4)},
    "mixtral": {"1x24GB": None, "4x24GB": None, "8x24GB": (1, 8), "1x80GB": None, "4x80GB": (2, 2), "8x80GB": (4, 2)},
}
"""Replicas, and devices that share each replica; None: does not fit."""


@pytest.mark.parametrize("link", ["nvlink", "pcie"])
@pytest.mark.parametrize(("name", "given"), [(name, given) for name in CELLS for given in CELLS[name]])
def test_every_cell_by_hand(name: str, given: str, link: str) -> None:
    """The first division, of 1, 2, 4, 8 devices a replica, whose bytes by hand fit is the one that is chosen, with those bytes."""
    expected = CELLS[name][given]
    found = decided(name, f"{given},{link}")
    usable, count = 0.9 * devices(given).memory, devices(given).count
    fits = {n: by_hand(name, **{"tensor" if link == "nvlink" else "pipeline": n}) for n in (1, 2, 4, 8) if n <= count}
    first = next((n for n, size in fits.items() if size <= usable), None)
    assert (None if first is None else (count // first, first)) == expected
    if expected is None or first is None:
        assert found.division is None
        return
    division = found.division
    assert division is not None
    assert (division.replicas, division.devices) == expected
    assert (division.tensor if link == "pcie" else division.pipeline) == 1
    assert division.experts == (first if name == "mixtral" and link == "nvlink" else 1)
    assert found.bytes.total == pytest.approx(fits[first], rel=1e-6)


def test_experts_are_dealt_out_where_heads_do_not_divide() -> None:
    """A mixture with 6 heads of 128 on 4 devices: a quarter of the experts each, all of the rest, and a quarter of the answers."""
    sizes = {**MODELS["mixtral"][1], "hidden_size": 768, "num_attention_heads": 6, "num_key_value_heads": 6, "num_local_experts": 64}
    wide = MixtralConfig(**sizes)
    model, given = Model(wide, "fp16", True), devices("4x60GB,nvlink")
    experts, matrices = 32 * 64 * 3 * 768 * 14336, 32 * 4 * 768**2
    words, rest = 2 * 32000 * 768, 32 * 64 * 768 + 65 * 768
    found = plan(model, CHAT, given)
    assert found.division == Division(1, tensor=1, experts=4)
    assert found.division.devices == 4
    assert str(found.division) == "1 replica of 4 devices, expert parallel over 4"
    assert found.bytes.weights == 2 * (experts // 4 + matrices + words + rest)
    assert found.bytes.cache == 2 * 32 * 6 * 128 * 2 * (8 // 4) * 4096
    assert found.bytes.work == 2 * 8192 * (4 * 768 + 2 * 14336) + 4 * 2 * 32000
    half = bytes_on_each(model, weights_of(wide), CHAT, Division(2, tensor=2, experts=2))
    assert half.total > given.usable  # two devices share six heads, and do not hold it
    assert any("4 does not divide the attention heads" in reason for reason in found.reasons)
    assert sum("whole experts lie on each of 4 devices" in reason for reason in found.reasons) == 1


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_parts_of_all_devices_are_the_whole_mixture(precision: Precision) -> None:
    weights, model_ = weights_of(config("mixtral")), model("mixtral", precision)
    whole = bytes_on_each(model_, weights, CHAT, Division(1)).weights
    for shared, experts in ((2, 2), (4, 4), (8, 8), (4, 1)):
        part = bytes_on_each(model_, weights, CHAT, Division(1, tensor=shared, experts=experts)).weights
        rest = 2 * (weights.whole.rest + weights.behind)
        assert shared * (part - rest) + rest == pytest.approx(whole)
    alone = bytes_on_each(model_, weights, CHAT, Division(1, experts=8)).weights
    without = tuple(dataclasses.replace(block, experts=0, expert_rows=0) for block in weights.blocks)
    common = bytes_on_each(model_, dataclasses.replace(weights, blocks=without), CHAT, Division(1)).weights
    assert 8 * (alone - common) + common == pytest.approx(whole)


def test_what_would_fit_is_said() -> None:
    assert "in int4 it would: 1 replica of 1 device" in decided("70B", "1x80GB").reasons[-1]
    assert "it fits on none of these devices" in decided("70B", "1x24GB").reasons[-1]


def test_a_latency_is_met_by_sharing_layers() -> None:
    """7B in fp16 reads 13.2 GB for a token: 3.9 ms at 3.35 TB/s, 2 ms on two devices. Of the table of words it reads one row."""
    eight = "8x80GB,nvlink,3.35TB/s"
    easy, hard = (decided("7B", eight, load=dataclasses.replace(CHAT, latency_ms=limit)) for limit in (5.0, 2.5))
    assert easy.division == Division(8)
    assert easy.floor_ms == pytest.approx(2e3 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096 + 66 * 4096) / 3.35e12)
    assert hard.division == Division(4, tensor=2)
    assert any("more than the 2.5 ms that are asked for" in reason for reason in hard.reasons)
    impossible = decided("7B", "2x80GB,pcie,3.35TB/s", load=dataclasses.replace(CHAT, latency_ms=1.0))
    assert impossible.division == Division(2)
    assert impossible.reasons[-1].startswith("no division meets the latency")
    assert decided("mixtral", eight, "int8").floor_ms < decided("70B", eight, "int8").floor_ms  # type: ignore[operator]


def test_every_decision_has_a_sentence() -> None:
    found = decided("70B", "8x80GB,nvlink")
    assert found.reasons[0].startswith("one device does not hold the model: ")
    assert found.reasons[1] == "4 devices share each layer, as fewer do not hold it; NVLink carries the two sums of every layer"
    assert str(found.division) == "2 replicas of 4 devices, tensor parallel over 4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x80GB", Devices(8, 80 * GB)),
        ("1x24GiB,pcie", Devices(1, 24 * 2**30)),
        ("4x80GB, nvlink, 3.35TB/s", Devices(4, 80 * GB, "nvlink", 3.35e12)),
        ("2x16000MB,900GB/s", Devices(2, 16 * GB, "pcie", 9e11)),
    ],
)
def test_devices_are_read(text: str, expected: Devices) -> None:
    assert devices(text) == expected


@pytest.mark.parametrize("text", ["", "8", "x80GB", "0x80GB", "8x0GB", "8x80", "8x80GB,infiniband", "8x80GB,0TB/s", "8 x 80GB", "-1x80GB"])
def test_other_devices_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match=r"--devices: .* is allowed") as caught:
        devices(text)
    assert len(caught.value.lines) == 1


def test_weights_by_part_add_up() -> None:
    """Head and words are one table where they are tied; rows and entries are no weights of their own."""
    blocks = (Block(1, 2, 4, 8, 16), Block(32, 2, 64, 8, 128))
    assert Weights(blocks, 256, 512, False, 1024, 7, 2048, 4096).total == 1 + 4 + 16 + 32 + 64 + 128 + 256 + 512 + 1024 + 2048 + 4096
    assert Weights(blocks, 256, 256, True).total == 1 + 4 + 16 + 32 + 64 + 128 + 256


SMALL = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 3000}
COUNTED: dict[str, tuple[Task, Any]] = {
    "bert": ("text-classification", BertConfig(**SMALL, intermediate_size=96, num_labels=900)),
    "gpt2": ("text-generation", GPT2Config(n_embd=64, n_head=4, n_layer=5, vocab_size=3000, bos_token_id=0, eos_token_id=0)),
    "llama": ("text-generation", LlamaConfig(**SMALL, intermediate_size=96, num_key_value_heads=2)),
    "llama-tied": ("text-generation", LlamaConfig(**SMALL, intermediate_size=96, num_key_value_heads=2, tie_word_embeddings=True)),
    "mixtral": ("text-generation", MixtralConfig(**SMALL, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)),
}
"""Models whose tables are a large part of them."""


def counted_model(name: str) -> tuple[Task, Model]:
    task, given = COUNTED[name]
    return task, Model(with_class(given, task), "fp16", TASKS[task].generates)


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("name", COUNTED)
def test_the_fullest_device_of_a_pipeline_holds_what_its_stage_reads(name: str) -> None:
    """Which end reads a weight outside of the blocks is found by gradients; mixtures have theirs where Llama has them."""
    task, served = counted_model(name)
    ends = with_class(COUNTED["llama" if name == "mixtral" else name][1], task)
    with without_memory(ends, task) as one, without_cache(one):
        readers = stages_of(one, rows_of(ends, task, 1, 4), 2, "model", compare=False).readers
    weights = weights_of(served.config)
    with without_memory(served.config, task) as one:
        blocks = list(blocks_of(one, "model"))
        found = [(key, block_of(key, blocks), parameter.numel()) for key, parameter in one.named_parameters()]
    for pipeline in (1, 2, 3, 5):
        sizes = [0] * pipeline
        for key, number, size in found:
            held = {0 if end == 0 else pipeline - 1 for end in readers[key]} if number is None else set()
            for stage, span in enumerate(stages(len(blocks), pipeline)):
                sizes[stage] += size * (number in span or stage in held)
        for stage, span in enumerate(stages(len(blocks), pipeline)):
            assert stage_bytes(weights, span, "fp16", Division(1, pipeline=pipeline)) == 2 * sizes[stage]
        fullest = bytes_on_each(served, weights, Load(streams=1, length=4), Division(1, pipeline=pipeline))
        assert fullest.weights in {2 * size for size in sizes}
        if served.generates:  # tables and logits outweigh a layer: the fullest is an end
            assert fullest.weights >= 2 * min(sizes[0], sizes[-1])


def test_stages_are_those_of_vllm() -> None:
    assert [[len(span) for span in stages(layers, count)] for layers, count in ((22, 4), (5, 3), (4, 3), (3, 2), (32, 4), (2, 1))] == [
        [5, 6, 6, 5],
        [2, 2, 1],
        [1, 2, 1],
        [2, 1],
        [8, 8, 8, 8],
        [2],
    ]


@pytest.mark.parametrize(("name", "tensor"), [("bert", 2), ("bert", 4), ("llama", 2), ("llama-tied", 2)])
def test_a_device_that_shares_layers_holds_its_part_of_them(name: str, tensor: int) -> None:
    """Of divided layers the biases of columns are divided too, which the plan counts whole; tables of words and heads are vLLM's."""
    task, served = counted_model(name)
    weights = weights_of(served.config)
    with without_memory(served.config, task, tensor) as one:
        size = sum(parameter.numel() for parameter in one.parameters())
    vocabulary = weights.words + weights.head * (not weights.tied)
    biases = 5 * (3 * 64 + 96) if name == "bert" else 0
    found = bytes_on_each(served, weights, Load(1, 4), Division(1, tensor=tensor)).weights
    assert found == 2 * (size - vocabulary * (tensor - 1) // tensor + biases * (tensor - 1) // tensor)


class Read(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the weights that operations read: those of tables by row, all others whole, each once."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = {id(weight): weight.numel() for weight in weights}
        self.whole: set[int] = set()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {id(each) for each in tree_leaves((args, kwargs)) if id(each) in self.weights}
        if func is torch.ops.aten.embedding.default:
            self.rows += result.numel()
        else:
            self.whole |= read
        return result

    @property
    def count(self) -> int:
        return self.rows + sum(self.weights[each] for each in self.whole)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "llama-tied"])
def test_the_least_time_is_that_of_the_weights_that_a_token_reads(name: str) -> None:
    task, served = counted_model(name)
    with without_memory(served.config, task) as one, torch.no_grad():
        features = rows_of(served.config, task, 1, 1)
        with Read(one.parameters()) as read:
            one.eval()(**features)
    assert bytes_read(served, weights_of(served.config), Division(1)) == 2 * read.count


def test_a_limit_that_is_met_is_not_refused() -> None:
    """Half of the weights are words, of which a token reads one row."""
    _, served = counted_model("llama")
    weights, given = weights_of(served.config), devices("1x80GB,nvlink,1GB/s")
    needed = 1e3 * 2 * (weights.total - weights.words + 64) / 1e9
    assert floor_ms(served, weights, Division(1), given) == pytest.approx(needed)
    chosen = plan(served, Load(1, 64, latency_ms=1.001 * needed), given)
    assert chosen.division == Division(1)
    assert not any("no division meets" in reason for reason in chosen.reasons)
