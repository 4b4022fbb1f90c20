"""The version of compress, as its installed package says it."""

from __future__ import annotations

import importlib.metadata

PACKAGE = "compress-transformers"


def version() -> str:
    """Returns the version of the installed package; `unknown` where the modules run without one."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
