"""The house: rooms that import downwards only, no circle of files, and one place for each fact."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from foundation.core.engines import ENGINES
from foundation.labels.tasks import TASKS
from foundation.schemes.table import SCHEMES

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compress", "foundation", "quantize", "distill", "prune", "export", "triton_repo")
METHODS = {"quantize", "distill", "prune", "export", "triton_repo"}
MAY_NAME_METHODS = tuple(f"compress.{room}" for room in ("pipeline", "recipe", "run", "search", "budget", "commands", "api"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
LIBRARIES = {  # files that list installed distributions, some of which are called like an engine
    "foundation.machine.environment",
    "compress.commands.doctor",
    "triton_repo.environment",
    "triton_repo.gpu.build_plans",
}
MOST_FILES = 3
MOST_ARGUMENTS = 8  # without self, cls and the ctx of autograd
JIT = "triton.jit"  # a GPU kernel is given no objects: each pointer, size and constant is an argument of its own
LONGEST_FUNCTION = 60


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Returns the syntax tree of a file as a list, read once for all tests."""
    wanted = ast.Import | ast.ImportFrom | ast.Constant | ast.FunctionDef
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, wanted)]


@cache
def imports(path: Path) -> set[str]:
    """Returns the modules of ours that a file imports, lazily and for types too."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found |= {whole} & MODULES.keys() or {node.module} & MODULES.keys()
    return found


@pytest.mark.whole
def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name: imports(path) - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of files: {' -> '.join(error.args[1])}")


def test_only_the_top_floors_name_the_packages_of_methods() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        if name.startswith("compress.") and not name.startswith(MAY_NAME_METHODS)
        for other in imports(path)
        if other.partition(".")[0] in METHODS
    ]
    assert not wrong


def test_only_the_kernels_need_the_triton_language() -> None:
    needs = re.compile(r"^\s*(import|from) (triton|export\.kernels)\b", re.MULTILINE)
    found = [name for name, path in MODULES.items() if needs.search(path.read_text(encoding="utf-8"))]
    assert "export.kernels.gemm" in found
    assert [name for name in found if not name.startswith(("export.kernels.", "export.fused."))] == []


def test_no_model_that_is_trained_later_runs_in_inference_mode() -> None:
    """Some models of Transformers cache tensors between calls (BEiT, DETR); training cannot use what inference mode has made."""
    found = [name for name, path in MODULES.items() if "inference_mode()" in path.read_text(encoding="utf-8")]
    assert "export.engines.torch" in found
    assert [name for name in found if not name.startswith("export.")] == []


@cache
def strings(path: Path) -> set[str]:
    """Returns the texts in a file that are not docstrings."""
    return {node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("name", [*ENGINES, *TASKS, *SCHEMES])
def test_a_name_stands_in_few_files(name: str) -> None:
    known = LIBRARIES if name in ENGINES else set()
    files = [module for module, path in MODULES.items() if module not in known and name in strings(path)]
    assert len(files) <= MOST_FILES, files


def test_functions_are_short_and_take_few_arguments() -> None:
    wrong = []
    for module, path in {"cli": ROOT / "cli.py", **MODULES}.items():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls", "ctx")])
                count = 0 if JIT in map(ast.unparse, node.decorator_list) else count
                lines = (node.end_lineno or 0) - node.lineno + 1
                if count > MOST_ARGUMENTS or lines > LONGEST_FUNCTION:
                    wrong.append(f"{module}.{node.name}: {count} arguments, {lines} lines")
    assert not wrong


def test_no_file_is_over_500_lines() -> None:
    files = [
        ROOT / "cli.py",
        *MODULES.values(),
        *(path for folder in ("tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")),
    ]
    assert not [str(path.relative_to(ROOT)) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 500]
