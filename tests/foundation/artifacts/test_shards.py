"""Weights in mapped files: what is written is what safetensors reads, and the other way round; nothing of it is memory of the process.

python -m pytest tests/foundation/artifacts/test_shards.py
"""

import json
import re
import tempfile
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foundation.artifacts.shards import DTYPES, ShardWriter, StoredWeights, mapped
from foundation.core.errors import InputError

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(TYPES)), min_size=1, max_size=8), st.sampled_from([1, 50, 10_000]))
def test_what_is_written_is_read_again(tensors: list[tuple[tuple[int, ...], torch.dtype]], limit: int) -> None:
    given = {f'layer.{i}."é"': random_tensor(shape, dtype, i) for i, (shape, dtype) in enumerate(tensors)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        writer = ShardWriter(folder, given, limit=limit)
        for name, tensor in given.items():
            if name.startswith("layer.0"):
                writer.new(name, tensor.shape, tensor.dtype).copy_(tensor)
            else:
                writer.copy(name, tensor)
        writer.close()
        files = sorted(folder.glob("*.safetensors"))
        by_library = {name: tensor for file in files for name, tensor in load_file(file).items()}
        stored = StoredWeights(folder, "model.path")
        assert by_library.keys() == given.keys() == set(stored.names)
        for name, tensor in given.items():
            for found in (by_library[name], stored[name]):
                assert found.dtype == tensor.dtype == stored.dtype(name), name
                assert tuple(found.shape) == tuple(tensor.shape) == stored.shape(name), name
                assert torch.equal(found, tensor), name
        index = folder / "model.safetensors.index.json"
        assert index.exists() == (len(files) > 1)
        if len(files) > 1:
            told = json.loads(index.read_text())
            assert set(told["weight_map"].values()) == {file.name for file in files}
            assert told["metadata"]["total_size"] == sum(prod(t.shape) * t.dtype.itemsize for t in given.values())
        else:
            assert files[0].name == "model.safetensors"


def test_shards_end_at_the_limit(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "abcd", limit=100)
    for name, size in (("a", 10), ("b", 15), ("c", 1), ("d", 40)):  # 40, 60, 4 and 160 bytes
        writer.copy(name, torch.arange(float(size)))
    writer.close()
    assert [sorted(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))] == [["a", "b"], ["c"], ["d"]]


def test_one_file_with_another_stem(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "ab", stem="quantization", limit=None)
    writer.copy("a", torch.ones(()))
    writer.copy("b", torch.arange(1e5))
    writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["quantization.safetensors"]
    assert load_file(tmp_path / "quantization.safetensors")["a"] == 1


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {name: random_tensor((3, 5), dtype, 0) for name, dtype in DTYPES.items()}
    save_file({**tensors, "scalar": torch.tensor(2.5), "none": torch.zeros(0, 4)}, tmp_path / "model.safetensors", {"format": "pt"})
    stored = StoredWeights(tmp_path, "model.path")
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    assert stored["scalar"] == 2.5
    assert stored["none"].shape == (0, 4)
    assert "scalar" in stored
    assert "other" not in stored


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:6], lambda data: data.replace(b"F32", b"F99"), lambda _: b""]
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: object) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, file)
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(InputError, match=r"model\.path: .*model\.safetensors is not a complete safetensors file"):
        StoredWeights(tmp_path, "model.path")


def test_a_mapped_file_is_no_memory_of_the_process(tmp_path: Path) -> None:
    def anonymous() -> int:
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024  # type: ignore[index]

    writer = ShardWriter(tmp_path, ["a"])
    before = anonymous()
    written = writer.new("a", (64, 2**18), torch.float32)  # 64 MiB
    written.fill_(1)
    writer.close()
    read = StoredWeights(tmp_path, "model.path")["a"]
    assert float(read.sum()) == 64 * 2**18
    assert anonymous() - before < 16
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        mapped(tmp_path / "model.safetensors", 2**20, (64, 2**18), torch.float32)


def test_tensors_stand_at_multiples_of_their_values(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "abc")
    for name, tensor in (("a", torch.ones(3).bfloat16()), ("b", torch.ones(2)), ("c", torch.ones(2))):  # 6 bytes, and none between
        writer.copy(name, tensor)
    writer.close()
    assert [sorted(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))] == [["a"], ["b", "c"]]
