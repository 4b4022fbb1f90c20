"""What is done on the meta device leaves nothing behind: a model answers the same, bit for bit, before and after it."""

from __future__ import annotations

import functools
import gc
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

from foundation.core.errors import InputError
from foundation.models import size
from foundation.models.architecture import attention
from foundation.models.architecture.shapes import on_meta
from foundation.models.architecture.structure import Structure
from foundation.models.meta import empty_caches, on_meta_device
from tests.architectures.rebuilt import logits
from tests.architectures.steps import drawn
from tests.architectures.table import ARCHITECTURES
from tests.seldom import seldom

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def caches(modules: int) -> list[functools._lru_cache_wrapper[object]]:
    """Returns every cache of a function of Transformers' models that there is in this process, of so many modules."""
    gc.unfreeze()  # frozen objects are not listed
    found = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]
    gc.freeze()
    return [one for one in found if str(one.__module__).startswith("transformers.models.")]


def forget() -> None:
    """Empties these caches."""
    for cache in caches(len(sys.modules)):
        cache.cache_clear()


OFTEN = {"beit", "data2vec-vision", "swin", "clip", "bert", "gpt2", "t5"}
"""The two of the table that keep tensors in caches today, and one of each kind that keeps none; the others are left to the slow tests."""


@pytest.mark.first(1)
@pytest.mark.parametrize("name", seldom(ARCHITECTURES, ARCHITECTURES.keys() - OFTEN))
def test_a_model_answers_the_same_after_it_was_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SMALL", 0)  # small models are looked at on the CPU
    monkeypatch.setattr(size, "_known", {})
    architecture = ARCHITECTURES[name]
    model = drawn(architecture)
    forget()
    before = logits(model, architecture)
    forget()  # so that what is looked at next would fill the caches
    assert size.count(model.config, architecture.task, 8).macs > 0
    with suppress(InputError):  # a model that cannot be pruned was run on the meta device all the same
        Structure.of(on_meta(model.config), "stages.prune")
    assert torch.equal(before, logits(model, architecture))


@pytest.mark.parametrize("fails", [False, True])
def test_caches_are_empty_before_and_after(fails: bool) -> None:
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias
    from transformers.models.dinov3_vit.modeling_dinov3_vit import get_patches_center_coordinates

    index = BeitRelativePositionBias.generate_relative_position_index
    real = index((2, 3)), get_patches_center_coordinates(2, 3, torch.float32, torch.device("cpu"))
    try:
        with on_meta_device():
            assert index((2, 3)).is_meta
            if fails:
                raise ValueError("cannot be run")
    except ValueError:
        assert fails
    assert torch.equal(index((2, 3)), real[0])
    assert torch.equal(get_patches_center_coordinates(2, 3, torch.float32, torch.device("cpu")), real[1])


def test_caches_of_modules_that_are_loaded_later_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        module = ModuleType(f"transformers.models.{name}_that_is_new")
        module.counted = functools.cache(lambda: torch.zeros(1))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        empty_caches()
        module.counted()
        empty_caches()
        assert module.counted.cache_info().currsize == 0, name


def test_there_is_one_way_to_the_meta_device() -> None:
    """Code that builds or runs models there without `on_meta_device` could leave tensors behind."""
    packages = ("compress", "foundation", "quantize", "distill", "prune", "export", "triton_repo")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    named = [path.name for path in files if 'torch.device("meta")' in path.read_text(encoding="utf-8")]
    assert named == ["meta.py"]
