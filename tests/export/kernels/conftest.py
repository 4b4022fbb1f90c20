import importlib.util
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]  # the extra `kernels`, which `dev` includes


def pytest_report_header() -> list[str]:
    return ["tests of kernels are left out: the package triton is not installed"] if collect_ignore_glob else []


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled anew, and leave nothing in the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield
