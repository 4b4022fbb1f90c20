"""Every call of the CUDA driver exists in its header, with as many arguments; the header is that which the Triton language brings."""

import ast
import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
MODULE = Path(__file__).resolve().parents[3] / "foundation" / "standalone" / "cuda_driver.py"
HEADER = (Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda.h").read_text(encoding="utf-8")

DEFINED = re.findall(r"^ *#define (cu\w+) +(?:__CUDA_API_PT(?:DS|SZ)\()?(cu\w+)", HEADER, re.MULTILINE)
RENAMED = [(plain, exported) for plain, exported in DEFINED if plain != exported]


def calls() -> list[tuple[str, int]]:
    """Returns the name and the number of arguments of every call of the driver."""
    found = []
    for node in ast.walk(ast.parse(MODULE.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "_check" and isinstance(node.args[1], ast.Constant):
            found.append((str(node.args[1].value), len(node.args) - 2))
        elif isinstance(node.func, ast.Attribute) and node.func.attr.startswith("cu"):
            found.append((node.func.attr, len(node.args)))
    return found


def declared(name: str) -> int | None:
    """Returns the number of arguments of a function that the library exports; None where the header has none of that name.

    Where the header defines a plain name as another one, the library exports that one with the arguments of the plain name.
    """
    renamed = {exported: plain for plain, exported in RENAMED}
    if name in dict(RENAMED):
        return None
    found = re.search(rf"CUresult CUDAAPI {renamed.get(name, name)}\(([^)]*)\);", HEADER)
    return None if found is None else len(found[1].split(","))


def test_every_call_is_in_the_header() -> None:
    found = calls()
    names = {name for name, _ in found}
    assert names >= {
        "cuInit",
        "cuMemAlloc_v2",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
    }
    assert {name: count for name, count in found if declared(name) != count} == {}


def test_the_header_is_read_as_it_is() -> None:
    assert declared("cuMemAlloc_v2") == 2
    assert declared("cuMemAlloc") is None  # the older one, which takes 32 bits
    assert declared("cuStreamBeginCapture") is None
    assert declared("cuNothing") is None


def test_the_mode_of_a_recording_is_that_of_the_header() -> None:
    from foundation.standalone.cuda_driver import THREAD_LOCAL

    found = re.search(r"CU_STREAM_CAPTURE_MODE_THREAD_LOCAL\s*=\s*(\d)", HEADER)
    assert found is not None
    assert int(found[1]) == THREAD_LOCAL
