import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]  # the extra `kernels`, which `dev` includes


def pytest_report_header() -> list[str]:
    return ["tests of kernels are left out: the package triton is not installed"] if collect_ignore_glob else []
