"""Traces of tiny models in three quarters of the time: what torch's exporter looks up or calculates again and again it does once.

Three things change, and no byte of a graph does (`test_traced_once.py` compares them):

- the registry of ONNX operators, which torch builds for each export, and its list of composite operators, read fifty times a trace, are
  shared;
- arithmetic on symbolic sizes is shared. Sympy makes `32*s0*(s1 - 1) + 32*s0` of its terms 32,000 times in a trace of a BERT of two layers,
  and 600 of these are different. Each is calculated once for each set of symbols;
- results of fake tensors are not cached. In one or two layers few operators come again, and an entry of the cache costs a second output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BINARY = ("mul", "add", "sub", "eq", "ne", "ge", "gt", "le", "lt", "sym_max", "sym_min")
"""Operators whose result is made of two expressions alone; the result of `mod` depends on ranges of values, too."""
PARTS = ("_expr", "pytype", "_hint", "_optimized_summation")
"""What a symbolic number is: its expression, its type, its value in the example, and whether the expression is a sum of symbols."""


@functools.cache
def share() -> None:
    """Shares this in all traces of the process. Loads the exporter."""
    from torch._dynamo import config
    from torch._export import utils
    from torch.fx.experimental.sym_node import SymNode
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry: Any = ONNXRegistry
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))
    operators: Any = utils
    operators._materialize_cpp_cia_ops = functools.cache(operators._materialize_cpp_cia_ops)  # no test registers operators
    for name in BINARY:
        setattr(SymNode, f"_{name}", shared(name, getattr(SymNode, f"_{name}")))
    config.fake_tensor_cache_enabled = False


@contextmanager
def plain() -> Iterator[None]:
    """As long as it lasts, graphs are traced as those of users are."""
    from torch._dynamo import config
    from torch._export import utils
    from torch.fx.experimental.sym_node import SymNode
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    share()
    changed = [(SymNode, f"_{name}") for name in BINARY] + [(ONNXRegistry, "from_torchlib"), (utils, "_materialize_cpp_cia_ops")]
    with pytest.MonkeyPatch.context() as patch, config.patch(fake_tensor_cache_enabled=True):
        for owner, name in changed:
            patch.setattr(owner, name, getattr(owner, name).__wrapped__)
        yield


def shared(name: str, calculate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns an operator of symbolic numbers that calculates each result once for each set of symbols, and makes a new number of it."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.experimental.sym_node import SymNode

    @functools.wraps(calculate)
    def operate(self: Any, other: Any) -> Any:
        symbols = self.shape_env
        if symbols is None or symbols is not other.shape_env or symbols._translation_validation_enabled or get_proxy_mode():
            return calculate(self, other)
        key = (name, symbols._replacements_version_counter, *(getattr(one, part) for one in (self, other) for part in PARTS))
        known = vars(symbols).setdefault("_known_results", {})
        if key not in known:
            result = calculate(self, other)
            if result._hint is not None:
                known[key] = tuple(getattr(result, part) for part in PARTS)
            return result
        result = SymNode.__new__(SymNode)
        result.shape_env, result.constant, result.fx_node, result._expr_ver, result._expr_cache = symbols, None, False, -1, None
        result._expr, result.pytype, result._hint, result._optimized_summation = known[key]
        return result

    return operate
