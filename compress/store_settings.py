"""The `store` key of a recipe, or the environment variable `COMPRESS_STORE`: where machines share the artifacts of their runs."""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator

from foundation.core.errors import InputError

VARIABLE = "COMPRESS_STORE"
ADDRESS = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<place>[^\s?#@]+)")
ALLOWED = "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, file:///FOLDER or another URL of fsspec is allowed, without user, password and query"


def _checked(url: str) -> str:
    """Returns the URL of a store without a slash at its end.

    Raises:
        ValueError: It is not a URL, or could hold credentials: they come from the environment alone.
    """
    found = ADDRESS.fullmatch(url)
    if found is None or "::" in url:
        raise ValueError(f"{ALLOWED}: credentials belong into the environment")
    if found["protocol"] in ("file", "local") and not found["place"].startswith("/"):
        raise ValueError("the absolute path of a folder is allowed after file://")
    return url.rstrip("/")


StoreUrl = Annotated[str, AfterValidator(_checked)]
"""URL of a store."""


def store_of(given: str | None) -> str | None:
    """Returns the URL of the store of a run: the recipe's, or else the environment's; None: nothing is shared.

    Args:
        given: `store` of the recipe.

    Raises:
        InputError: The environment variable holds no URL of a store; its value is not shown.
    """
    if given is not None:
        return given
    try:
        return _checked(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
    except ValueError as error:
        raise InputError(VARIABLE, "its value is no URL of a store", str(error)) from error
