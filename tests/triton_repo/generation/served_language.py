"""Tiny language models in the real server, and how tests ask them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundation.core.engines import served_on
from tests.triton_repo.generation import tiny_language as tiny
from triton_repo import environment, layout
from triton_repo.config import from_text, to_text
from triton_repo.generation.client import LanguageClient, Piece
from triton_repo.generation.layout import write_language_repository
from triton_repo.service import Service

PAGED, STATEFUL, DRAFTED, CROWDED = "llama-fp32", "mistral-fp32", "drafted", "crowded"
KINDS = {PAGED: "llama", STATEFUL: "mistral"}
WAITING = 3
CROWD = 200
"""Requests that the crowded model takes."""
RUNNING = 8
CONTEXT = 30_000
LONG = {"ids": [5, 6, 7], "max_tokens": 25_000, "ignore_eos": True}
"""An answer that takes longer than any test waits."""


@contextmanager
def language_server(root: Path) -> Iterator[Service]:
    """Serves a paged and a stateful model, one with a draft, and one that takes a crowd, from a repository below `root`."""
    exported = tiny.export(root / "export", (("llama", "paged"), ("mistral", "stateful")))
    models = layout.served_models(exported, served_on("cpu", generates=True))
    write_language_repository(root / "repository", models, batch_sizes=(1, RUNNING))
    told = models[0].engine
    proposals = {"draft": "llama-fp32", "file": told.file, "tokens": 4, "properties": told.properties}
    drafted = replace(models[0], name=DRAFTED, engine=told.with_(speculation=proposals))
    write_language_repository(root / "repository", [drafted], batch_sizes=(1, RUNNING), proposals=True)
    crowded = replace(models[0], name=CROWDED)
    write_language_repository(root / "repository", [crowded], batch_sizes=(1, RUNNING), max_waiting=CROWD - RUNNING)
    for name in (*KINDS, DRAFTED):
        path = root / "repository" / name / "config.pbtxt"
        config = from_text(path.read_text())
        config.parameters["max_waiting"].string_value = str(WAITING)
        config.parameters["context"].string_value = str(CONTEXT)
        path.write_text(to_text(config))
    with Service(root / "repository", environment.check(), root / "log") as started:
        yield started


def pieces(running: Service, model: str, **asked: Any) -> list[Piece]:
    with LanguageClient(running.grpc_address, model, seconds=60) as client:
        return list(client.stream(**asked))


def tokens(found: list[Piece]) -> list[int]:
    return [token for piece in found for token in piece.tokens]


def post(running: Service, path: str, document: Any) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(running.http_address, timeout=60)
    connection.request("POST", path, json.dumps(document) if not isinstance(document, bytes) else document)
    answer = connection.getresponse()
    return answer.status, answer.getheader("Content-Type", ""), answer
