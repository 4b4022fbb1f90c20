"""`compress serve` and `compress deploy`: the model repository of a run, in the foreground or in a folder of its own.

What checks a recipe loads torch, so a server that is started does without: it reads no recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton_repo import deployment
from triton_repo.config import model_names
from triton_repo.control import Control
from triton_repo.service import Service
from triton_repo.serving import serve as serve_repository
from triton_repo.serving import server_of


def serve(folder: Path, log: Callable[[str], None] = print, ports: tuple[int, int, int] = (0, 0, 0), everything: bool = False) -> None:
    """Serves until interrupted; the server's output goes to `triton.log` in the folder. `compress rollout` changes the models meanwhile.

    Args:
        folder: A run or a deployment.
        log: Prints one line.
        ports: Ports of gRPC, HTTP and metrics; 0 takes a free one.
        everything: Loads every model, and not only what was chosen to be served.

    Raises:
        InputError: There is no model repository, it is damaged, it is being served already, or there is no server environment.
        ServerError: The server did not start, or died too often.
    """
    repository = deployment.repository_of(folder)
    models = None if everything else deployment.chosen_models(folder)
    server = server_of(repository, folder / deployment.LOG, ports, models)
    others = [name for name in model_names(repository) if name not in server.models]
    if others:
        log(f"not loaded: {', '.join(others)}; give --all to load every model, and not only what was chosen to be served")
    with Control(folder, lambda request, say: _answer(server, request, say)):
        serve_repository(server, log)


def _answer(server: Service, request: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    from compress.commands.rollout import answer

    return answer(server, request, say)


def deploy(folder: Path, out: Path, log: Callable[[str], None] = print) -> Path:
    """Copies the model repository of a run to a folder outside of it; see `triton_repo.deployment`."""
    from compress.pipeline import opened

    opened(folder)
    return deployment.deploy(folder, out, log)
