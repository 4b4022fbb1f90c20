"""A checkpoint as what its files say: shared while they stay, read anew when one changes, and never a loaded weight."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foundation.core.errors import InputError
from foundation.core.stamps import SETTLED_NS, stamps
from foundation.core.target import Target
from foundation.models.config import _config
from foundation.models.folder import Checkpoint


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_bert, tmp_path / "model")


def settle(folder: Path) -> None:
    """Waits until a stamp of the folder's files says nothing of the time at which it was taken."""
    while stamps(folder.iterdir()) != stamps(folder.iterdir()):
        os.sched_yield()


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(10, 99), st.sampled_from(["in place", "replaced"]), st.booleans()), min_size=1, max_size=4))
def test_what_is_read_is_what_the_file_holds(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, str, bool]]) -> None:
    folder = tmp_path_factory.mktemp("model")
    for width, how, changed_by_the_reader in changes:
        written = json.dumps({"model_type": "bert", "hidden_size": width, "num_attention_heads": 1})  # of one size, whatever the width
        target = folder / ("config.json" if how == "in place" else "new")
        target.write_text(written)
        target.replace(folder / "config.json")
        config = Checkpoint(folder).config
        assert (config.hidden_size, config.use_cache) == (width, True)
        if changed_by_the_reader:
            config.hidden_size, config.use_cache = 1, False
        assert (Checkpoint(folder).config.hidden_size, Checkpoint(folder).config.use_cache) == (width, True)


def test_objects_of_one_folder_share_what_was_read(folder: Path) -> None:
    settle(folder)
    first, before = Checkpoint(folder), _config.cache_info()
    shared = [first.preprocessor("text-classification", 16, Target()), first.weights, first.config]
    second = Checkpoint(folder)
    assert first == second
    assert second.preprocessor("text-classification", 16, Target()) is shared[0]
    assert second.weights is shared[1]
    assert second.config is not shared[2]
    assert second.config.to_dict() == shared[2].to_dict()
    assert _config.cache_info().misses <= before.misses + 1
    assert second.preprocessor("text-classification", 8, Target()) is not shared[0]


def test_a_changed_file_is_read_anew(folder: Path) -> None:
    settle(folder)
    names = Checkpoint(folder).preprocessor("text-classification", 16, Target()).labels
    document = json.loads((folder / "config.json").read_text())
    document["id2label"] = {str(index): name[::-1] for index, name in enumerate(names)}
    (folder / "config.json").write_text(json.dumps(document))
    assert Checkpoint(folder).preprocessor("text-classification", 16, Target()).labels == tuple(name[::-1] for name in names)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError):
        Checkpoint(folder).preprocessor("text-classification", 16, Target())


def test_weights_are_mapped_on_access(folder: Path) -> None:
    settle(folder)
    held, stored = Checkpoint(folder).weights, load_file(folder / "model.safetensors")
    assert {name: held.shape(name) for name in held.names} == {name: tuple(value.shape) for name, value in stored.items()}
    assert not [value for value in vars(held).values() if isinstance(value, torch.Tensor)]
    assert held["classifier.weight"].data_ptr() != held["classifier.weight"].data_ptr()  # a map each, which its last tensor closes
    save_file({"classifier.weight": torch.full((3, 5), 2.0)}, folder / "model.safetensors")
    assert torch.equal(Checkpoint(folder).weights["classifier.weight"], torch.full((3, 5), 2.0))


def test_a_stamp_of_a_new_file_is_unlike_every_other(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    assert stamps([file]) != stamps([file])
    old = file.stat().st_mtime_ns - 2 * SETTLED_NS
    settle(tmp_path)
    before = stamps([file])
    file.write_text("b")
    os.utime(file, ns=(old, old))  # a copy keeps times of modification: the time of the change does not
    settle(tmp_path)
    assert stamps([file]) != before
    assert stamps([tmp_path / "missing"]) == ()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_file_settles_whatever_the_clock_of_its_file_system_says(hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the clock of this machine is wrong."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + hours * 3600 * 10**9)
    file = tmp_path / "file"
    file.write_text("a")
    assert stamps([file]) != stamps([file])
    began = time.monotonic()
    while stamps([file]) != stamps([file]):
        assert time.monotonic() - began < 10
        os.sched_yield()


def test_an_old_file_has_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 25 * 3600 * 10**9)
    (tmp_path / "file").write_text("a")
    assert stamps([tmp_path / "file"]) == stamps([tmp_path / "file"])


def test_a_checkpoint_names_its_scheme(folder: Path) -> None:
    assert (Checkpoint(folder).is_quantized, Checkpoint(folder).scheme) == (False, None)
    (folder / "quantization.json").write_text('{"schema": 1, "scheme": "w8a8"}')
    assert (Checkpoint(folder).is_quantized, Checkpoint(folder).scheme) == (True, "w8a8")
