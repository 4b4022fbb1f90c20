import importlib.util

from tests.export.conftest import interpreted  # noqa: F401 - the fixture

NEED_TRITON = ["test_ahead_of_time.py", "test_gelu.py", "test_measurements.py", "test_squad.py", "test_timing.py", "test_w4a16.py"]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else NEED_TRITON  # the extra `kernels`, which `dev` includes
