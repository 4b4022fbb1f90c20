"""The builds of the stage `export`: variants and precisions (`export.export` explains the choice)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from export.engines.registry import engine_module
from export.graph.quantized import precision_of
from foundation.artifacts.artifact import lineage
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context

HALVES: Final = ("fp16", "bf16")
Request = tuple[str, str, str, str]
"""Whose answers: engine, variant, precision and float precision."""


@dataclass(frozen=True)
class Build:
    """One checkpoint in one precision."""

    variant: str
    checkpoint: Checkpoint
    precision: str
    floating: str
    """The float variant that it was made of; itself where it is float."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.variant}-{self.precision}"

    @property
    def float_precision(self) -> str:
        """Precision of its float part."""
        return self.precision if self.is_half else "fp32"

    @property
    def is_half(self) -> bool:
        """Whether it is a float build in 16 bits, from the graph of the fp32 one."""
        return self.precision in HALVES

    @property
    def is_quantized(self) -> bool:
        """Whether its checkpoint is quantized."""
        return self.precision not in ("fp32", *HALVES)


def planned(context: Context, variants: Literal["ends", "all"], draft: str | None = None) -> list[Build]:
    """Returns the builds, in order: variants first to last, then on a processor with bf16 the float one of the last in that, from
    the files of its fp32. What half graphs add is in `rivals`.

    Args:
        context: The context of the stage.
        variants: Which variants; see `export.export`.
        draft: One that is built in any case.
    """
    precisions = {name: precision_of(Checkpoint(artifact.path)) for name, artifact in context.checkpoints.items()}
    made = {name: lineage(name, context.checkpoints) for name in precisions}
    floating = {name: floating_of(line, lambda other: precisions[other] == "fp32") for name, line in made.items()}
    names = list(precisions) if variants == "all" else ends(made, floating, draft)
    builds = {name: Build(name, Checkpoint(context.checkpoints[name].path), precisions[name], floating[name]) for name in names}
    last = replace(builds[floating[names[-1]]], precision="bf16")
    return [*builds.values(), *([last] if computes_bf16(context) else [])]


def rivals(builds: Sequence[Build], half: str) -> list[Build]:
    """Returns the 16-bit float build that the last int8 build has to beat, unless it is planned; for engines with half graphs.

    Args:
        builds: What `planned` gave.
        half: fp16 or bf16.
    """
    last = [build for build in builds if not build.is_half][-1]
    rival = Build(last.floating, next(build.checkpoint for build in builds if build.variant == last.floating), half, last.floating)
    return [] if rival in builds else [rival]


def has_half_graphs(context: Context) -> bool:
    """Whether an engine is built whose graph says what runs in 16 bits."""
    return any(engine_module(engine).strongly_typed() for engine in context.target.engines)


def floating_of(line: Sequence[str], is_float: Callable[[str], bool]) -> str:
    """Returns the last variant of a line that is float."""
    return next(name for name in reversed(line) if is_float(name))


def ends(lineages: Mapping[str, Sequence[str]], floating: Mapping[str, str], draft: str | None = None) -> list[str]:
    """Returns the variants to build where not all are.

    Args:
        lineages: Variants, in order, and for each those that it was made by: itself the last.
        floating: For each the float one that it was made of.
        draft: One that is built in any case.
    """
    within = {name for line in lineages.values() for name in line[:-1]}
    last = [name for name in lineages if name not in within]
    return [name for name in lineages if name in {next(iter(lineages)), *last, *(floating[end] for end in last), draft}]


def reads_graph(context: Context) -> bool:
    """Whether an engine is built from the ONNX graph of its build; else that is not written."""
    return any(engine_module(engine).reads_graph() for engine in context.target.engines)


def computes_bf16(context: Context) -> bool:
    """Whether an engine is built whose float part may be bf16, and the processor has bf16 arithmetic."""
    return context.target.device == "cpu" and any(engine_module(engine).computes_bf16() for engine in context.target.engines)
