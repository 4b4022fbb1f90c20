"""Nodes and initializers of a flat ONNX graph, put in and taken out."""

from __future__ import annotations

from collections.abc import Sequence

import onnx


def replace_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Makes these the nodes of a graph, but for those whose outputs nothing reads, and removes initializers that nothing reads.

    Args:
        graph: Changed in place.
        nodes: In topological order; may be nodes of the graph itself.
    """
    used, kept = {value.name for value in graph.output}, []
    for node in reversed(nodes):
        if any(name in used for name in node.output):
            used |= set(node.input)
            kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del graph.node[:]
    graph.node.extend(reversed(kept))
    prune_initializers(graph)


def prune_initializers(graph: onnx.GraphProto) -> None:
    """Removes the initializers of a flat graph that no node reads."""
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
