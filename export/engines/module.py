"""The interface of an engine's file for the rest of the project.

Every engine has `refusal`, `absence`, `build` and `open_engine`. What one engine does differently is a function of its file, with the name
of a field below; an engine without it gets the default. Other code calls the function, and never asks which engine it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array

if TYPE_CHECKING:  # the process of an engine reads this file, and needs neither pydantic nor torch for it
    from transformers import PreTrainedConfig

    from export.choices import FloatSetting
    from export.engines.spec import BuildRequest, Engine, EngineSpec
    from export.parity.own_rounding import Rounding
    from export.parity.parity import LayerParity
    from foundation.artifacts import exported
    from foundation.models.folder import Checkpoint
    from foundation.schemes.table import SchemeFacts


class WithTensors(Protocol):
    """A layer or a site whose tensors are compared."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of its tensors in the graph."""


Probe = Callable[[Sequence[WithTensors]], Mapping[str, Array]]
"""Returns the tensors of layers and sites, by name."""


def _in_fp32(setting: FloatSetting) -> FloatSetting:
    return "fp32"


def _as_exported(precision: str, model: Path, folder: Path) -> Path:
    return model


def _no_graph(scheme: SchemeFacts, floating: Path, checkpoint: Checkpoint, model: Path) -> None:
    """Writes nothing: the engine reads `model.onnx`."""


def _rounded_head(scheme: SchemeFacts) -> Rounding | None:
    from export.parity.own_rounding import HEAD

    return HEAD if scheme.activations == "dynamic" else None


def static_layers(scheme: SchemeFacts | None, model: Path, probe: Probe) -> list[LayerParity]:
    """Compares the int8 layers with static scales; the arguments are as for `EngineModule.layers`."""
    from export.parity.parity import compare_layers, quantized_gemms
    from export.parity.products import compare_sites, quantized_sites

    gemms = [] if scheme is not None and scheme.activations == "dynamic" else quantized_gemms(Graph(model))
    if not gemms:
        return []
    sites = quantized_sites(Graph(model))
    tensors = probe([*gemms, *sites])
    return [*compare_layers(gemms, tensors), *compare_sites(sites, tensors)]


def _none(config: PreTrainedConfig) -> str | None:
    return None


def _no() -> bool:
    return False


def _yes() -> bool:
    return True


@dataclass(frozen=True)
class EngineModule:
    """The functions of one engine."""

    refusal: Callable[[str, Path], str | None]
    """(precision, model): in one line why the engine cannot run a graph of this precision; None if it can."""
    absence: Callable[[str], str | None]
    """(device): in one line why no engine of this kind can run on a device (cpu, cuda) of this machine; None if it can."""
    build: Callable[[BuildRequest], Iterable[exported.Engine]]
    """(request): writes the files of the engine; gives its entries, the recommended mode first."""
    open_engine: Callable[[EngineSpec], Engine]
    """(spec): opens the engine in this process; raises what its library raises where it does not run here."""
    model_refusal: Callable[[PreTrainedConfig], str | None] = _none
    """(config): in one line why the engine cannot run the model of a Transformers config, as far as the config shows it; None if it can.
    It is checked before the first stage."""
    proves_ahead: Callable[[], bool] = _no
    """(): whether a run continues on a machine where the engine cannot run: it is proved ahead of time, or recorded as not runnable."""
    computes_bf16: Callable[[], bool] = _no
    """(): whether the engine computes float layers in bf16 on the CPU of this machine, from the files of fp32."""
    float_part: Callable[[FloatSetting], FloatSetting] = _in_fp32
    """(setting): what the float part of an int8 build can be of the setting `float_precision`. Default: fp32."""
    strongly_typed: Callable[[], bool] = _no
    """(): whether the graph says which operations run in 16-bit floats (`export.half_graphs`), fp16 or bf16."""
    reads_graph: Callable[[], bool] = _yes
    """(): whether the engine is built from `model.onnx`, or reports by it. Where no engine of the target is, the graph is not written."""
    own_graph: Callable[[str, Path, Path], Path] = _as_exported
    """(precision, model, folder): the graph that the engine is built from, if not `model` then one written to `folder`."""
    write_graph: Callable[[SchemeFacts, Path, Checkpoint, Path], None] = _no_graph
    """(scheme, floating, checkpoint, model): writes the graph of a quantized checkpoint that no other engine reads, next to `model`."""
    all_tokens: Callable[[], bool] = _no
    """(): whether the graph computes the tokens of the last layer that no head reads, too (`export.graph.unread_tokens`)."""
    rounding: Callable[[SchemeFacts], Rounding | None] = _rounded_head
    """(scheme): how the engine quantizes tokens by itself (`export.parity.own_rounding`); None if the graph says it all. Default: by scales
    that are not torch's under dynamic int8."""
    batch_invariant: Callable[[], bool] = _no
    """(): whether the engine can be built so that an answer does not depend on the answers that are written with it."""
    layers: Callable[[SchemeFacts | None, Path, Probe], list[LayerParity]] = static_layers
    """(scheme, model, probe): the comparison of each int8 layer with torch; `probe` gives tensors of the open engine. Default: layers with
    static scales are compared."""

    @classmethod
    def of(cls, module: ModuleType) -> EngineModule:
        """Returns the functions of an engine's file, and the defaults of those that it does not have."""
        return cls(**{field.name: getattr(module, field.name) for field in fields(cls) if hasattr(module, field.name)})
