"""Clients that the documentation shows, asked of a running server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT, blocks
from triton_repo.service import Service

RECIPE = re.compile(r"^compress run recipes/([\w-]+)\.yaml", re.MULTILINE)


def ask(page: str, server: Service, folder: Path, runner: str | None = None) -> list[str]:
    """Runs every block of a page that is a client (`<!-- run by: TEST -->`) against a server.

    Args:
        page: Path below the root.
        server: A running server; its addresses and the name of its run take the place of those that the page shows.
        folder: Where the clients run.
        runner: The test whose blocks to run; None: all of the page.

    Returns:
        What each of them printed.
    """
    printed = []
    recipe = RECIPE.search((ROOT / page).read_text(encoding="utf-8"))
    shown = recipe[1] if recipe else "my-small-classifier"
    served = server.models[0].removesuffix("-image").removesuffix("-text")
    for block in blocks(ROOT / page):
        if block.runner is None or runner not in (None, block.runner):
            continue
        text = block.body.replace("127.0.0.1:8001", server.grpc_address).replace("127.0.0.1:8000", server.http_address)
        assert shown in text, f"{block}: what is served has the name of the run, {shown}"
        text = re.sub(rf'(?<=["/]){re.escape(shown)}(?=["/-])', served, text)  # a run has another name in each test
        command = [sys.executable, "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
        printed.append(done.stdout)
    assert printed, f"{page} has no client"
    return printed
