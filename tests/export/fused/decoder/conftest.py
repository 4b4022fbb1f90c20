import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]  # the extra `kernels`, which `dev` includes
