"""The routes of other servers' clients, before a stand-in for Triton."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from tests.triton_repo.apis.stand_in_triton import Triton, write_models
from triton_repo.front.admission import Admission
from triton_repo.front.http_side import Paths
from triton_repo.front.inference import Inference
from triton_repo.front.limits import Load
from triton_repo.front.routes import Routes

Asking = Callable[[str], Awaitable[Any]]
Served = Callable[..., Any]


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the models, and their routes."""
    folder = tmp_path_factory.mktemp("live")
    return folder, write_models(folder)


@pytest.fixture
def served(repository: tuple[Path, dict[str, Any]], tmp_path: Path) -> Served:
    """Calls a coroutine function with the address of a front of some models; returns what it returns."""

    def run(asking: Asking, *models: str, triton: Triton | None = None) -> Any:
        folder, routes = repository
        (tmp_path / "routes.json").write_text(json.dumps({name: routes[name] for name in models}))

        async def all_of_it() -> Any:
            channel: Any = triton or Triton()
            infer = Inference(channel, Routes(str(tmp_path / "routes.json")), Admission())
            async with TestServer(Paths(channel, Load(), infer, models, str(folder)).application()) as server:
                return await asking(str(server.make_url("")).rstrip("/"))

        return asyncio.run(all_of_it())

    return run
