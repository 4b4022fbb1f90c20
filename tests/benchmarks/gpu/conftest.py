import importlib.util
from collections.abc import Iterator

import pytest

from tests.export.conftest import interpreted  # noqa: F401 - the fixture

NEED_TRITON = ["test_ahead_of_time.py", "test_gelu.py", "test_measurements.py", "test_squad.py", "test_timing.py", "test_w4a16.py"]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else NEED_TRITON  # the extra `kernels`, which `dev` includes


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled anew, and leave nothing in the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield
