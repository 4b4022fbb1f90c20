"""Divided checkpoints: all ranks together give the logits of the undivided model, to the bit where it is int8; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from export.divided import folder as divided
from export.divided import rank as rank_of
from export.divided.ranks import Meeting
from foundation.core.errors import InputError
from foundation.models.checkpoint import load as load_whole
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.schemes.int8 import DynamicInt8Linear, Int8Linear
from foundation.schemes.int8 import quantize as codes_of
from foundation.schemes.scales import SMALLEST_SCALE
from tests.export.divided.divided_checkpoints import FAMILIES, answers, divided_answers, inputs, quantized

pytestmark = pytest.mark.whole

KEY = "stages.export.tensor_parallel"
CASES = [("bert", "w8a8, smooth", 2), ("vit", "w4a16, zero points", 4), ("llama", "w4a16", 4)]
SCHEMES = ("w8a8", "w8a8, smooth", "w8a8-dynamic", "w8a16", "w4a16", "w4a16, zero points", "fp8")
MORE = [(family, scheme, ranks) for family in FAMILIES for scheme in SCHEMES for ranks in (2, 4)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "scheme", "ranks"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in CASES)]
)
def test_ranks_give_the_logits_of_the_whole(family: str, scheme: str, ranks: int, tmp_path: Path) -> None:
    checkpoint, features = quantized(family, scheme), inputs(family)
    expected = answers(checkpoint, features)
    assert float(expected.std()) > 0.2  # not the same for every row
    for found in divided_answers(checkpoint, features, ranks, tmp_path / "out"):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", 4),
        *(pytest.param(name, ranks, marks=pytest.mark.slow) for name in FAMILIES for ranks in (2, 4) if (name, ranks) != ("llama", 4)),
    ],
)
def test_int8_codes_are_equal(family: str, ranks: int, tmp_path: Path) -> None:
    """Every input of every int8 layer has the codes that it has in the undivided model; ranks together for a row layer."""
    checkpoint, features = quantized(family, "w8a8"), inputs(family)
    whole = load_whole(checkpoint)
    expected = recorded(whole)
    with torch.inference_mode():
        forward(whole, features)
    folders = divided.write(Checkpoint(checkpoint), tmp_path / "out", ranks, KEY)
    meeting = Meeting(ranks)
    models = [rank_of.load(folder, meeting.of(rank)) for rank, folder in enumerate(folders)]
    seen = [recorded(model) for model in models]
    meeting.together([lambda model=model: forward(model, features) for model in models])
    rows = set(rank_of.read_division(folders[0]).rows)
    assert len(rows) >= 4
    for name, codes in expected.items():
        parts = [one[name] for one in seen]
        for mine in [torch.cat(parts, dim=-1)] if name in rows else parts:
            assert torch.equal(mine, codes), name


def recorded(model: nn.Module) -> dict[str, Tensor]:
    """Returns a dictionary that gets the codes of all inputs of every int8 layer when the model runs, by its name in the whole model."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            key, ours = name.removesuffix(".layer"), module.codes
            module.codes = lambda x, key=key, ours=ours: found[key].append(ours(x)) or found[key][-1]  # type: ignore[method-assign]
    return _Joined(found)


class _Joined(dict[str, Tensor]):
    def __init__(self, found: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self.found = found

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat([codes.reshape(-1, codes.shape[-1]) for codes in self.found[name]])

    def items(self):  # type: ignore[no-untyped-def,override]
        return [(name, self[name]) for name in self.found]


def test_int8_attention_and_residuals_keep_their_scales(tmp_path: Path) -> None:
    checkpoint, features = quantized("bert", "w8a8", sites=True), inputs("bert")
    expected = answers(checkpoint, features)
    assert not torch.equal(expected, answers(quantized("bert", "w8a8"), features))
    for found in divided_answers(checkpoint, features, 2, tmp_path / "out"):
        assert torch.equal(found, expected)


def test_the_scale_of_a_token_is_that_of_all_its_inputs(tmp_path: Path) -> None:
    """An outlier on one rank has to widen the steps of the others."""
    x = torch.tensor([[0.01, 0.02, 0.03, 100.0]])
    layer = DynamicInt8Linear("x", torch.ones(1, 4, dtype=torch.int8), _dynamic(), None)
    meeting = Meeting(2)
    from export.divided.row_linear import RowLinear

    parts = [DynamicInt8Linear("x", torch.ones(1, 2, dtype=torch.int8), _dynamic(), None) for _ in range(2)]
    rows = [RowLinear(part, meeting.of(rank)) for rank, part in enumerate(parts)]
    with torch.inference_mode():
        expected = layer(x)
    found = meeting.together([lambda rank=rank, row=row: row(x[:, 2 * rank : 2 * rank + 2]) for rank, row in enumerate(rows)])
    assert all(torch.equal(one, expected) for one in found)
    naive = codes_of(x, torch.tensor(100.0 / 127).clamp(min=SMALLEST_SCALE), -127, 127).sum() * (100.0 / 127)
    torch.testing.assert_close(expected[0, 0], naive)


def _dynamic():  # type: ignore[no-untyped-def]
    from foundation.schemes.int8 import DynamicScales

    return DynamicScales(torch.ones(1), 8)


@pytest.mark.parametrize(("family", "scheme"), [("llama", "w8a8"), ("llama", "w4a16")])
def test_a_rank_stores_its_share_in_codes(family: str, scheme: str, tmp_path: Path) -> None:
    """int8: one byte a weight of its share; int4: half of one. What is not divided is there as it is."""
    checkpoint = quantized(family, scheme)
    folder = divided.write(Checkpoint(checkpoint), tmp_path / "out", 2, KEY)[1]
    stored = load_file(folder / rank_of.WEIGHTS)
    down = stored["model.layers.1.mlp.down_proj.weight"]
    assert (down.dtype, tuple(down.shape)) == (torch.int8, (32, 32 if scheme == "w8a8" else 16))
    whole = load_file(checkpoint / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])
    assert not [name for name in stored if "scale" in name]
    config = Checkpoint(folder, "rank").config
    assert (config.intermediate_size, config.num_key_value_heads) == (32, 1)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    stored = load_file(divided.write(Checkpoint(quantized("qwen3", "w4a16")), tmp_path / "out", 2, KEY)[0] / rank_of.WEIGHTS)
    assert ("model.embed_tokens.weight" in stored) + ("lm_head.weight" in stored) == 1


def test_a_head_of_its_own_stays_one_though_the_config_ties_it(tmp_path: Path) -> None:
    """As Transformers loads files with both weights, whatever the config says."""
    source = tmp_path / "source"
    shutil.copytree(quantized("qwen3", "w8a16"), source)
    stored = load_file(source / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    expected = answers(source, inputs("qwen3"))
    assert not torch.allclose(expected, answers(quantized("qwen3", "w8a16"), inputs("qwen3")), atol=0.1)
    for found in divided_answers(source, inputs("qwen3"), 2, tmp_path / "out"):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_float_checkpoint_is_divided_too(tmp_path: Path) -> None:
    checkpoint = tmp_path / "float"
    load_whole(quantized("bert", "w8a16")).config.save_pretrained(checkpoint)
    source = load_file(quantized("bert", "w8a16") / "model.safetensors")
    save_file(source, checkpoint / "model.safetensors", metadata={"format": "pt"})
    expected = answers(checkpoint, inputs("bert"))
    for found in divided_answers(checkpoint, inputs("bert"), 4, tmp_path / "out"):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_what_cannot_be_divided_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        divided.write(Checkpoint(quantized("llama", "w8a8")), tmp_path / "out", 3, KEY)
    assert caught.value.lines == (f"{KEY}: 3 given, but block 0 has 4 attention heads; give 2, the nearest number that fits",)
    with pytest.raises(InputError) as caught:
        divided.write(Checkpoint(quantized("vit", "w4a16", group=16)), tmp_path / "out", 4, KEY)
    (problem,) = caught.value.lines
    assert problem.startswith(f"{KEY}: 4 given, but vit.")
    assert problem.endswith("8 inputs on each rank, and groups of 16 of them share a scale; give 2, the nearest number that fits")
    assert not (tmp_path / "out").exists()
    config = Checkpoint(quantized("llama", "w8a8")).config
    with pytest.raises(InputError, match=r"5 given, but block 0 has 4 .*; give 4, the nearest"):
        divided.check_division(config, 5, KEY)
    divided.check_division(config, 4, KEY)


def test_a_folder_of_a_rank_is_no_checkpoint(tmp_path: Path) -> None:
    folder = divided.write(Checkpoint(quantized("llama", "w8a8")), tmp_path / "out", 2, KEY)[0]
    with pytest.raises(InputError, match=r"safetensors"):
        load_whole(folder)


@pytest.mark.parametrize("damage", ["division", "weights", "lost"])
def test_damaged_folders_are_told(damage: str, tmp_path: Path) -> None:
    folder = divided.write(Checkpoint(quantized("llama", "w8a8")), tmp_path / "out", 2, KEY)[0]
    if damage == "division":
        (folder / rank_of.DIVISION).write_text(json.dumps({"schema": 1, "rank": 2, "ranks": 2, "rows": []}))
    elif damage == "weights":
        (folder / rank_of.WEIGHTS).write_bytes(b"no")
    else:
        tensors = load_file(folder / rank_of.WEIGHTS)
        del tensors["model.norm.weight"]
        save_file(tensors, folder / rank_of.WEIGHTS)
    with pytest.raises(InputError, match=str(folder.name)) as caught:
        rank_of.load(folder, Meeting(1).of(0))
    assert len(caught.value.lines) == 1


def test_a_rank_that_fails_ends_all() -> None:
    meeting = Meeting(3)

    def task(rank: int) -> Tensor:
        if rank == 1:
            raise InputError("rank 1", "no")
        return meeting.of(rank).sum(torch.ones(2))

    with pytest.raises(InputError, match="rank 1: no"):
        meeting.together([lambda rank=rank: task(rank) for rank in range(3)])
    assert [
        one.tolist() for one in meeting.together([lambda rank=rank: meeting.of(rank).sum(torch.full((2,), rank)) for rank in range(3)])
    ] == [[3, 3]] * 3
