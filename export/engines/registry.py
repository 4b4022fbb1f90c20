"""The engines by name: each is the file of this folder that is called like its row in `compress.core.engines`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from export.engines.spec import Engine, EngineSpec

if TYPE_CHECKING:
    from export.engines.spec import EngineModule


def engine_module(engine: str) -> EngineModule:
    """Returns the file of an engine; imported only here, since each needs a library of its own."""
    return cast("EngineModule", importlib.import_module(f"export.engines.{engine}"))


def open_engine(spec: EngineSpec) -> Engine:
    """Opens an engine in this process; raises what its library raises where it does not run here."""
    return engine_module(spec.engine).open_engine(spec)
