"""The meta device, on which models are built and run for their shapes only, without weights or values.

Some Transformers models keep tensors in `functools` caches: the relative positions of BEiT are computed once for each window. Such a cache
does not know devices, so a run on the meta device would leave a tensor without values in it, and every later model would read that. So all
code that builds or runs a model on the meta device does so inside `on_meta_device`, which empties these caches before and after. Nor does a
cache know inference mode, whose tensors no gradient can flow through: code that takes gradients empties the caches first.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch

LIBRARY = "transformers."
WITHOUT_TENSORS = "transformers.utils."
"""Caches of which libraries are installed; they hold no tensors."""
CacheOfFunction = functools._lru_cache_wrapper

_searched: set[str] = set()
_newest = [""]
"""The last module in `sys.modules` when it was searched: modules that are loaded later come after it."""
_caches: dict[int, CacheOfFunction[Any]] = {}


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Creates tensors on the meta device, and keeps caches of Transformers from carrying tensors into this block or out of it."""
    empty_caches()
    try:
        with torch.device("meta"):
            yield
    finally:
        empty_caches()


def empty_caches() -> None:
    """Empties the `functools` caches of all loaded modules of Transformers; the functions compute their results again."""
    newest = next(reversed(sys.modules))
    if newest != _newest[0]:  # thousands of modules are loaded, and models are built often
        _search_modules()
        _newest[0] = newest
    for cache in _caches.values():
        cache.cache_clear()


def _search_modules() -> None:
    """Finds the caches of modules of Transformers that were loaded since the last search."""
    for name, module in list(sys.modules.items()):
        if name.startswith(LIBRARY) and not name.startswith(WITHOUT_TENSORS) and name not in _searched:
            _searched.add(name)
            _caches.update((id(cache), cache) for cache in _caches_in(module))


def _caches_in(module: ModuleType) -> Iterator[CacheOfFunction[Any]]:
    """Yields the caches of functions and methods of a module, also those inside a decorated function."""
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) and value.__module__ == module.__name__ else [value]
        for member in members:
            function = getattr(member, "__func__", member)  # of a static or class method
            caches = (found for found in (function, *_enclosed(function)) if isinstance(found, CacheOfFunction))
            yield from (cache for cache in caches if not str(cache.__module__).startswith(WITHOUT_TENSORS))  # also where it is imported


def _enclosed(function: Any) -> list[Any]:
    """Returns the variables that a function closes over."""
    if not isinstance(function, FunctionType) or not function.__closure__:
        return []
    return list(inspect.getclosurevars(function).nonlocals.values())
