"""The engines by name: each is the file of this folder that is called like its row in `foundation.core.engines`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from export.engines.module import EngineModule
from foundation.core.engines import REFERENCE, device_of
from foundation.core.errors import Problem
from foundation.core.shown import reason

if TYPE_CHECKING:
    from export.engines.spec import Engine, EngineSpec
    from foundation.core.target import Target


def engine_module(engine: str) -> EngineModule:
    """Returns the functions of an engine; its file is imported only here, since each needs a library of its own."""
    return EngineModule.of(importlib.import_module(f"export.engines.{engine}"))


def absent(target: Target) -> list[Problem]:
    """Returns one line for each engine that a target needs and that cannot run on this machine; torch is the baseline of every run."""
    problems: list[Problem] = []
    reasons: set[str] = set()
    for engine in dict.fromkeys((REFERENCE, *target.engines)):
        device = device_of(engine, target.device)
        try:
            module = engine_module(engine)
            why = module.absence(device)
        except ImportError as error:
            problems.append(
                Problem("target.engines", f"{engine} cannot be imported ({reason(error)})", remedy="install it, or leave it out")
            )
            continue
        if why is None or why in reasons or module.proves_ahead():
            continue
        reasons.add(why)
        if module.absence("cpu") is not None:  # the engine is for GPUs alone
            problems.append(
                Problem("target.engines", f"{engine} given", why, "give target.device: cuda on a machine that has it, or leave it out")
            )
        else:
            problems.append(
                Problem("target.device", f"{target.device} given", why, "run this on a machine that has it, or give device: cpu")
            )
    return problems


def runs_here(target: Target) -> bool:
    """Whether any engine of a target can run on this machine, so that there are predictions to compare with."""
    return any(engine_module(engine).absence(device_of(engine, target.device)) is None for engine in target.engines)


def open_engine(spec: EngineSpec) -> Engine:
    """Opens an engine in this process; raises what its library raises where it does not run here."""
    if spec.towers:
        from export.engines.towers import Towers

        return Towers(spec, engine_module(spec.engine).open_engine)
    return engine_module(spec.engine).open_engine(spec)
