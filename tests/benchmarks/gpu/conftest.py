import importlib.util

from tests.export.conftest import interpreted  # noqa: F401 - the fixture

NEED = ("ahead_of_time", "decoder_rivals", "dependent_code", "endings", "gelu", "measurements", "rescaling", "rivals", "squad", "timing")
NEED_TRITON = [f"test_{name}.py" for name in NEED]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else NEED_TRITON  # the extra `kernels`, which `dev` includes
