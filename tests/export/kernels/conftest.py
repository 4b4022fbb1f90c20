import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
INTERPRETER = Path(__file__).with_name("interpreter.py")
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]  # the extra `kernels`, which `dev` includes


def pytest_report_header() -> list[str]:
    return ["tests of kernels are left out: the package triton is not installed"] if collect_ignore_glob else []


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process of its own that interprets kernels; returns what it returns and raises what it raises."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(INTERPRETER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            pickle.dump((function, arguments, named), process.stdin)
            process.stdin.flush()
            worked, answer = pickle.load(process.stdout)
            if not worked:
                raise answer
            return answer

        yield call
        process.stdin.close()


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled anew, and leave nothing in the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield
