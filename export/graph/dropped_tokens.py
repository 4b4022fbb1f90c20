"""Tokens that leave a model leave it as early as can be: the same logits for less work.

Behind a block of `foundation.models.architecture.dropped_tokens` some tokens are selected, when the block has computed all of them. The
states that come into it say which ones. So the selection moves up to those: of those that go, keys and values are computed and no more.

    x [B, S, D] -> query -> attention -> add x -> norm -> FFN -> add -> norm [B, S, D] -> select [B, K, D]
    x [B, S, D] -> select [B, K, D] -> query -> attention -> add -> norm -> FFN -> add -> norm [B, K, D]

For K of S tokens that leaves of the multiply-accumulates of the block

    4 S D^2 + 2 S^2 D + 2 S D F   ->   2 S D^2 + 2 K D^2 + 2 K S D + 2 K D F

How a selection looks is how the exporter writes `states[rows, tokens]`: GatherND with pairs of both, int64 [B, K, 2].
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import helper

from export.graph.nodes import replace_nodes
from export.graph.unread_tokens import KnownGraph, ask, write_narrowed

TOKENS = 1
"""Axis of the tokens in states [B, S, D]."""


def select_early(graph: onnx.GraphProto) -> int:
    """Selects tokens as early as it gives the same numbers, in place.

    Args:
        graph: A graph as `export.graph.unread_tokens.drop_unread_tokens` takes it; it may have been there. Shapes are not kept up to date.

    Returns:
        How many products of matrices have fewer rows now.
    """
    known = KnownGraph.of(graph)
    selections = [node.output[0] for node in graph.node if node.op_type == "GatherND" and len(known.shapes[node.input[0]]) == TOKENS + 2]
    return sum(_move(graph, output) for output in selections)


def _move(graph: onnx.GraphProto, output: str) -> int:
    """Moves one selection, given the name of its output; returns the number of products with fewer rows."""
    places = next(node.input[1] for node in graph.node if output in node.output)
    first = _ancestors(graph, places)
    replace_nodes(graph, [node for early in (True, False) for node in graph.node if (node.output[0] in first) is early])
    known, nodes = KnownGraph.of(graph), list(graph.node)  # held: nodes are compared by identity
    selection = next(node for node in nodes if output in node.output)
    states = known.shapes[selection.input[0]]

    def selectable(name: str, axis: int) -> bool:
        """Whether a tensor has tokens of each row where states have them; a bias for all rows has not."""
        return axis == TOKENS and known.shapes[name][:-1] == states[:-1]

    asked = ask(graph, {id(selection): TOKENS}, known, selectable)
    read = {(name, axis) for node in nodes for name, axis in zip(node.input, asked.get(id(node), ()), strict=False)}
    taken = [(name, axis) for name, axis in read if axis is not None and known.narrowed.get(name) != axis]
    products: int = sum(node.op_type == "MatMul" for node in nodes if id(node) in asked)
    if not products or not all(selectable(*tensor) for tensor in taken):
        return 0
    typed = {value.name: value for value in graph.value_info}
    typed[selection.input[0]].type.CopyFrom(typed[output].type)  # the next selection is asked for with it
    for node in nodes:
        for index, name in enumerate(node.input):
            if name == output:
                node.input[index] = selection.input[0]
    write_narrowed(graph, asked, known, _selecting(places), "kept")
    return products


def _selecting(places: str) -> Callable[[str, str, int], onnx.NodeProto]:
    def select(name: str, output: str, axis: int) -> onnx.NodeProto:
        return helper.make_node("GatherND", [name, places], [output], f"{output}/GatherND")

    return select


def _ancestors(graph: onnx.GraphProto, name: str) -> set[str]:
    """Returns the first outputs of all nodes that a tensor is computed by."""
    producer = {output: node for node in graph.node for output in node.output}
    found: set[str] = set()
    pending: list[str] = [name]
    while pending:
        node = producer.get(pending.pop())
        if node is not None and node.output[0] not in found:
            found.add(node.output[0])
            pending += node.input
    return found
