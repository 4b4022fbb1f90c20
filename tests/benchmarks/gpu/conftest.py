import importlib.util

from tests.export.conftest import interpreted  # noqa: F401 - the fixture

NEED_TRITON = [f"test_{name}.py" for name in ("ahead_of_time", "endings", "gelu", "measurements", "rivals", "squad", "timing")]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else NEED_TRITON  # the extra `kernels`, which `dev` includes
