"""How much of a model runs in int8 and int4, counted from what the engine itself says.

    int8_share     = MACs of weight GEMMs that the engine runs in int8 / MACs of all weight GEMMs
    int8_share_all = the same with the two products of attention counted too
    int4_share     = MACs of weight GEMMs that read int4 weights / MACs of all weight GEMMs

MACs come from the ONNX graph (`export.graph.macs`), precisions from the engine's own graph (`Engine.precisions`). A share is None, with a
reason, where the engine does not report the precision of every GEMM: guessing would be claiming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from export.graph.macs import Gemm
from foundation.artifacts.exported import Layer, Shares
from foundation.schemes.table import INT4_PRECISIONS


def share(gemms: Sequence[Gemm], precisions: Mapping[str, str]) -> Shares:
    """Returns the shares of one engine.

    Args:
        gemms: What `export.graph.macs.count_macs` gave.
        precisions: What the engine gave, by name of the node.
    """
    layers = tuple(Layer(name=gemm.name, kind=gemm.kind, macs=gemm.macs, precision=precisions.get(gemm.node)) for gemm in gemms)
    weights = [layer for layer in layers if layer.kind == "weight"]
    unknown = [str(layer.name) for layer in layers if layer.precision is None]
    reason = None
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        reason = f"the engine's graph does not tell the precision of {shown}"
    return Shares(
        int8_share=_part(weights, "int8"),
        int8_share_all=_part(layers, "int8"),
        int4_share=_part(weights, *INT4_PRECISIONS),
        int8_share_reason=reason,
        layers=layers,
    )


def _part(layers: Sequence[Layer], *precisions: str) -> float | None:
    if not layers or any(layer.precision is None for layer in layers):
        return None
    macs = [(layer.macs or 0, layer.precision in precisions) for layer in layers]
    return sum(count for count, counts in macs if counts) / sum(count for count, _ in macs)
