"""Checkpoints within a training stage are written and read one tensor at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from foundation.training.state import Entry, Unwritten, by_bytes, read_state, write_state

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
SETTINGS = {"seed": 0}


def unwritten(tensors: dict[str, torch.Tensor]) -> Unwritten:
    entries = by_bytes((name, Entry.of(value)) for name, value in tensors.items())
    return Unwritten({name: entry.make for name, entry in entries.items()}, {"steps": 3})


def refused(text: str) -> None:
    raise AssertionError(text)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=12))
def test_tensors_of_any_type_and_shape_come_back(tmp_path_factory: pytest.TempPathFactory, described: list[Any]) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    tensors = {f"{i} é": torch.randint(0, 2, shape).to(dtype) for i, (dtype, shape) in enumerate(described)}
    write_state(scratch, SETTINGS, unwritten(tensors))
    found = read_state(scratch, SETTINGS, refused)
    assert found is not None
    assert found.values == {"steps": 3}
    assert {name: value.dtype for name, value in found.tensors.items()} == {name: value.dtype for name, value in tensors.items()}
    assert all(torch.equal(value, tensors[name]) for name, value in found.tensors.items())
    stored = load_file(scratch / "training" / "tensors.safetensors")  # the format of everybody
    assert all(torch.equal(stored[name], value) for name, value in tensors.items())


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive, most = weakref.WeakSet[torch.Tensor](), [0]

    def gather() -> torch.Tensor:
        value = torch.ones(1000)
        alive.add(value)
        most[0] = max(most[0], len(alive))
        return value

    state = Unwritten({str(i): gather for i in range(20)}, {})
    write_state(tmp_path, SETTINGS, state)
    state.gather()
    assert most == [1]


def test_what_is_read_is_no_copy_in_memory(tmp_path: Path) -> None:
    write_state(tmp_path, SETTINGS, unwritten({"a": torch.ones(1_000_000)}))

    def held() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))

    before = held()
    found = read_state(tmp_path, SETTINGS, refused)
    assert found is not None
    assert float(found.tensors["a"].sum()) == 1_000_000
    assert held() - before < 2_000  # KiB, of 4,000
