"""Errors in the schema of the API to which a path belongs."""

from __future__ import annotations

from foundation.core.json_value import Json
from triton_repo.front.apis import embeddings_inference, openai


def error_document(path: str, status: int, message: str) -> tuple[int, dict[str, Json]]:
    """Returns status and body of a failed request.

    Args:
        path: Path of the request.
        status: HTTP status.
        message: One line.
    """
    if path.startswith("/v1/") or path.endswith("/v1/chat/completions"):
        return status, openai.error_document(status, message)
    if path in embeddings_inference.PATHS:
        return embeddings_inference.error_document(status, message)
    return status, {"error": message}
