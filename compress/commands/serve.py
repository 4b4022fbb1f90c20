"""`compress serve` and `compress deploy`: the model repository of a run, in the foreground or in a folder of its own.

What checks a recipe loads torch, so a server that is started does without: it reads no recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from triton_repo import deployment
from triton_repo.control import Control
from triton_repo.entrance import Entrance
from triton_repo.ports import FIXED, Ports
from triton_repo.served_models import ServedModel, divided
from triton_repo.service import Service
from triton_repo.serving import serve as serve_repository
from triton_repo.serving import server_of, traces_here


def serve(
    folder: Path,
    log: Callable[[str], None] = print,
    ports: Ports = FIXED,
    everything: bool = False,
    entrance: Entrance | None = None,
) -> None:
    """Serves until interrupted; the server's output goes to `triton.log` in the folder. `compress rollout` changes the models meanwhile.

    Args:
        folder: A run or a deployment.
        log: Prints one line.
        ports: Ports of gRPC, HTTP and metrics; 0 takes a free one.
        everything: Loads every model, and not only what was chosen to be served.
        entrance: Where it listens, and what it asks of clients there; default: loopback.

    Raises:
        InputError: There is no model repository, it is damaged, it is being served already, a port is taken, a key or the certificate is
            missing or wrong, or there is no server environment.
        ServerError: The server did not start, or died too often.
    """
    repository = deployment.repository_of(folder)
    models, others = divided(deployment.models_in(folder), everything)
    server = server_of(repository, folder / deployment.LOG, ports, models, entrance, traces_here(log))
    if others:
        names = ", ".join(model.folder for model in others)
        log(f"not loaded: {names}; give --all to load every model, not only the served ones")
    with Control(folder, lambda request, say: _answer(server, models, request, say)):
        serve_repository(server, log)


def _answer(server: Service, models: list[ServedModel], request: Mapping[str, object], say: Callable[[str], None]) -> dict[str, object]:
    from compress.commands.rollout import answer

    return answer(server, models, request, say)


def deploy(folder: Path, out: Path, log: Callable[[str], None] = print, everything: bool = False) -> Path:
    """Copies what is served of the model repository of a run, or all of it, to a folder outside; see `triton_repo.deployment`."""
    from compress.report.document import Report
    from compress.report.summary import missed_goals
    from compress.run.opened import opened

    missed = missed_goals(Report.load(opened(folder).folder).contents)
    for line in missed:
        log(f"warning: {line}")
    return deployment.deploy(folder, out, log, everything=everything, missed=missed)
