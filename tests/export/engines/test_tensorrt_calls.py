"""Every call of TensorRT is in one module. Each exists, with these arguments, in the bindings of TensorRT-RTX, in the bindings
of TensorRT 11, and in the published stubs of TensorRT 10; the stand-in takes what they take."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import tensorrt_rtx_bindings as rtx

from tests.export import tensorrt_stand_in as stand_in
from tests.export.engines.tensorrt_calls import CALLS, LATER, ONLY_RTX, printed, recorded

ROOT = Path(__file__).resolve().parents[3]
MODULE = ROOT / "foundation" / "standalone" / "tensorrt_plan.py"
SOURCES = {"tensorrt_10_13": "tensorrt-stubs 10.13.0.35.1", "tensorrt_11_4": "tensorrt-cu13-bindings 11.4.0.106"}
RECORDED = {name: json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8")) for name in SOURCES}
METHODS = {kind: {name for name in names if callable(getattr(getattr(rtx, kind), name))} for kind, names in CALLS.items()}


def arities(kind: str, name: str) -> set[int]:
    """Returns how many arguments a method of the bindings takes, by the signatures that they print."""
    allowed: set[int] = set()
    for arguments in re.findall(rf"{name}\(self: [^,)]*,? ?(.*?)\) ->", getattr(getattr(rtx, kind), name).__doc__):
        given = [part for part in re.split(r", (?=\w+:)", arguments) if part]
        allowed |= set(range(sum("=" not in part for part in given), len(given) + 1))
    return allowed


def arities_recorded(version: str, kind: str, name: str) -> set[int]:
    """The same by a recording."""
    overloads = RECORDED[version]["classes"][kind][name] or []
    return {count for given in overloads for count in range(sum(not optional for _, optional in given), len(given) + 1)}


def arities_everywhere(kind: str, name: str) -> set[int]:
    """The same in all versions."""
    return arities(kind, name).intersection(*(arities_recorded(version, kind, name) for version in SOURCES))


def calls() -> list[tuple[str, int]]:
    """Returns the name and the number of arguments of every call of a method of TensorRT in the module."""
    names = set().union(*METHODS.values())
    tree = ast.parse(MODULE.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [(node.func.attr, len(node.args) + len(node.keywords)) for node in found if node.func.attr in names]


@pytest.mark.parametrize("kind", [*CALLS, *LATER])
def test_everything_that_is_called_exists_in_the_bindings(kind):
    assert (CALLS | LATER)[kind] - set(dir(getattr(rtx, kind))) == set()


@pytest.mark.parametrize("version", SOURCES)
@pytest.mark.parametrize("kind", CALLS)
def test_everything_that_is_called_exists_in_the_recordings(kind, version):
    assert RECORDED[version]["source"] == SOURCES[version]
    assert {name: value for name, value in RECORDED[version]["classes"][kind].items() if value == "absent"} == {}
    assert set(RECORDED[version]["classes"][kind]) == CALLS[kind]


def test_attention_nodes_exist_in_tensorrt_11():
    classes = RECORDED["tensorrt_11_4"]["classes"]
    assert {kind: set(classes[kind]) for kind in LATER} == LATER
    assert "absent" not in [value for kind in LATER for value in classes[kind].values()]


def test_calls_have_the_arguments_that_all_take():
    found = calls()
    assert len(found) > 30
    for name, count in found:
        kinds = [kind for kind in METHODS if name in METHODS[kind]]
        assert any(count in arities_everywhere(kind, name) for kind in kinds) or name == "set_shape", (name, count)
    assert arities_everywhere("IOptimizationProfile", "set_shape") == {4}  # the shapes are unpacked


def test_the_list_of_calls_is_whole():
    """Names that the module asks an object for are those in the list, Python's and numpy's own, or its own."""
    tree = ast.parse(MODULE.read_text(encoding="utf-8"))
    asked = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    listed = set().union(*CALLS.values(), *LATER.values(), CALLS, LATER, ONLY_RTX)
    python = {"__class__", "__init__", "append", "clear", "items", "join", "perf_counter", "setdefault", "split", "values", "decomposable"}
    python |= {"get", "pop", "warn"}
    numpy = {"ascontiguousarray", "astype", "concatenate", "dtype", "float32", "full", "itemsize", "nan", "nbytes", "nptype", "prod"}
    levels = {"ERROR", "INTERNAL_ERROR"}
    own = {name for name in asked if name.startswith("_")}
    own |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    device = {"stream", "block", "upload", "download", "wait", "record", "launch", "close"}
    assert asked - listed - python - numpy - levels - own - device == set()
    assert {"ERROR", "INTERNAL_ERROR"} <= set(dir(rtx.ILogger.Severity))


@pytest.mark.whole
def test_no_other_file_calls_tensorrt():
    """Others pass the module on, and ask it for its version."""
    for path in [*(ROOT / "export").rglob("*.py"), *(ROOT / "triton_repo").rglob("*.py"), *(ROOT / "compress").rglob("*.py")]:
        if path != MODULE:
            used = re.findall(r"\b(?:trt|rtx|tensorrt)\.(\w+)", "\n".join(code_lines(path)))
            assert set(used) <= {"__version__", "absence", "build", "open_engine"}, path


def code_lines(path: Path) -> list[str]:
    """Returns a file without its texts and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


@pytest.mark.parametrize(
    ("kind", "ours"),
    [("ICudaEngine", stand_in._Engine), ("IExecutionContext", stand_in._Context), ("EngineInspector", stand_in._Engine)],
)
def test_the_stand_in_takes_what_the_bindings_take(kind, ours):
    for name in METHODS[kind]:
        taken = len(inspect.signature(getattr(ours, name)).parameters) - 1
        assert taken in arities_everywhere(kind, name), (kind, name)


def test_a_stub_is_read_as_it_is():
    stub = "class {0}:\n    name: int\n    def f(self, a: int, b: int = 0) -> None: ...\n"
    classes = {kind: "".join(f"    {name}: int\n" for name in sorted(names)) or "    pass\n" for kind, names in CALLS.items()}
    text = "".join(f"class {kind}:\n{body}" for kind, body in classes.items())
    text = text.replace("class Runtime:\n    deserialize_cuda_engine: int\n", "class Runtime:\n    def other(self) -> int: ...\n")
    found = recorded(text + stub.format("Unasked"))
    assert found["Builder"]["create_network"] is None
    assert found["Runtime"]["deserialize_cuda_engine"] == "absent"
    text = text.replace("    def other(self) -> int: ...\n", "    def deserialize_cuda_engine(self, a: int, b: int = 0) -> int: ...\n")
    assert recorded(text)["Runtime"]["deserialize_cuda_engine"] == [[["a", False], ["b", True]]]


def test_printed_signatures_are_read_as_they_are():
    class Builder:
        def create_network(self) -> None:
            """create_network(self: t.Builder, flags: typing.SupportsInt = 0) -> t.INetworkDefinition"""

        def build_serialized_network(self) -> None:
            """1. build_serialized_network(self: t.Builder, network: t.N, config: t.C) -> t.H
            2. build_serialized_network(self: t.Builder) -> t.H"""

        create_builder_config = 3

    found = printed(type("Module", (), {"Builder": Builder}))["Builder"]
    assert found["create_network"] == [[["flags", True]]]
    assert found["build_serialized_network"] == [[["network", False], ["config", False]], []]
    assert found["create_builder_config"] is None
    assert found["create_optimization_profile"] == "absent"
