"""How models are divided for serving, against memory computed by hand from their published sizes."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from transformers import BertConfig, GPT2Config, LlamaConfig, MixtralConfig

from compress.core.errors import InputError
from compress.devices.given import Devices, devices
from compress.devices.served import Bytes, Division, Load, Model, Plan, Precision, bytes_on_each, plan
from compress.devices.weights import Weights, weights_of
from compress.models.size import count

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
    assert found["bert-large"].matrices == 24 * (4 * 1024**2 + 2 * 1024 * 4096)
    assert found["bert-large"].vocabulary == (30522 + 512 + 2) * 1024
    assert found["7B"].matrices == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert found["7B"].vocabulary == 2 * 32000 * 4096
    assert found["7B"].rest == (2 * 32 + 1) * 4096
    assert found["70B"].matrices == 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert found["mixtral"].experts == 32 * 8 * 3 * 4096 * 14336
    assert found["mixtral"].matrices == 32 * (2 * 4096**2 + 2 * 4096 * 1024)
    assert found["mixtral"].rest == 32 * 8 * 4096 + (2 * 32 + 1) * 4096  # routers and norms
    assert [round(found[name].total / 1e9, 2) for name in ("7B", "70B", "mixtral")] == [6.74, 68.98, 46.7]


@pytest.mark.parametrize("name", ["bert-large", "7B"])
def test_no_weight_is_lost(name: str) -> None:
    task = "text-generation" if name == "7B" else "text-classification"
    assert weights_of(config(name)).total == count(config(name), task, 8).parameters


def test_shared_weights_count_once() -> None:
    found = weights_of(GPT2Config(architectures=["GPT2LMHeadModel"]))
    assert found.vocabulary == (50257 + 1024) * 768
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
    turns = bytes_on_each(model("70B"), weights, CHAT, Division(1, pipeline=3))
    assert turns.cache == 2 * 27 * 8 * 128 * 2 * 8 * 4096  # 80 layers over 3 devices: 27, 27 and 26


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
        "bert-large": (24, 1024, 1024, 4096, 1, 30522 + 512 + 2, weights_of(config("bert-large")).rest),
        "7B": (32, 4096, 4096, 11008, 1, 2 * 32000, 65 * 4096),
        "70B": (80, 8192, 1024, 28672, 1, 2 * 32000, 161 * 8192),
        "mixtral": (32, 4096, 1024, 14336, 8, 2 * 32000, 32 * 8 * 4096 + 65 * 4096),
    }[name]
    block = 4 * h**2 + 2 * h * i if name == "bert-large" else 2 * h**2 + 2 * h * k + 3 * experts * h * i
    held, tokens = -(-layers // pipeline), 32 * 384 if name == "bert-large" else 8192
    weights = 2 * (block * held / tensor + words * h / (tensor * pipeline) + rest)
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
        assert shared * (part - 2 * weights.rest) + 2 * weights.rest == pytest.approx(whole)
    alone = bytes_on_each(model_, weights, CHAT, Division(1, experts=8)).weights
    common = bytes_on_each(model_, dataclasses.replace(weights, experts=0, expert_rows=0), CHAT, Division(1)).weights
    assert 8 * (alone - common) + common == pytest.approx(whole)


def test_what_would_fit_is_said() -> None:
    assert "in int4 it would: 1 replica of 1 device" in decided("70B", "1x80GB").reasons[-1]
    assert "it fits on none of these devices" in decided("70B", "1x24GB").reasons[-1]


def test_a_latency_is_met_by_sharing_layers() -> None:
    """7B in fp16 reads 13.2 GB for a token: 3.9 ms at 3.35 TB/s, 2 ms on two devices."""
    eight = "8x80GB,nvlink,3.35TB/s"
    easy, hard = (decided("7B", eight, load=dataclasses.replace(CHAT, latency_ms=limit)) for limit in (5.0, 2.5))
    assert easy.division == Division(8)
    assert easy.floor_ms == pytest.approx(2e3 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096 + 65 * 4096) / 3.35e12)
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
    assert len(caught.value.problems) == 1


def test_weights_by_part_add_up() -> None:
    assert Weights(1, 2, 3, 4, 5, 6).total == 15
