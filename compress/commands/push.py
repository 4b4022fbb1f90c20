"""Uploads a published folder to the Hub, as one commit to a repository, which is private where it is new.

The token comes from the environment variable HF_TOKEN alone, and is written nowhere; HF_ENDPOINT names another server than the Hub.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.artifacts.artifact import files_below
from foundation.core.errors import InputError
from foundation.core.shown import reason

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKEN, ENDPOINT = "HF_TOKEN", "HF_ENDPOINT"


def check_target(repository: str) -> None:
    """Raises if nothing could be uploaded: before anything is written.

    Args:
        repository: ORG/NAME.

    Raises:
        InputError: The name is not one of the Hub, or there is no token.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented there, and not in its list of names

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(f"--push {repository}", reason(error), remedy="give ORG/NAME") from error
    if "/" not in repository:
        raise InputError(f"--push {repository}", "no organization or user in it", remedy="give ORG/NAME")
    if not os.environ.get(TOKEN):
        raise InputError(f"--push {repository}", f"no token in {TOKEN}", remedy=f"export {TOKEN}=... with a token that may write")


def upload(folder: Path, repository: str, message: str) -> str:
    """Uploads every file of a folder in one commit; files of the repository with the same names are replaced, others stay.

    Args:
        folder: A published folder.
        repository: ORG/NAME; made, private, where it is new.
        message: Of the commit.

    Returns:
        The address of the commit.

    Raises:
        InputError: The server cannot be reached, or refuses the repository, the card or a file.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import HfHubHTTPError

    api = _api()
    operations = [CommitOperationAdd(name, file) for name, file in files_below(folder).items()]
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        return str(api.create_commit(repository, operations, commit_message=message).commit_url)
    except (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError) as error:
        remedy = f"{folder} is complete: mend it and upload with `hf upload`, or publish again"
        raise InputError(f"--push {repository}", f"{api.endpoint} refused it ({reason(error)})", remedy=remedy) from error


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get(ENDPOINT), token=os.environ[TOKEN])
