"""The load generator in the process of the tests, for tests that are about something else than its process."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

import pytest

from triton_repo.load import process


class Inside:
    """Stands for the process of the generator, which takes two seconds to import what it needs."""

    returncode = 0

    def __init__(self, command: Sequence[str], **settings: Any) -> None:
        self.job = json.loads(command[-1])

    def communicate(self) -> tuple[bytes, bytes]:
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                process.main(self.job)
        finally:
            gc.enable()  # the process of the generator collects nothing while it measures
        return printed.getvalue().encode(), b""

    def kill(self) -> None:
        """It has ended."""

    def wait(self) -> int:
        return self.returncode


@pytest.fixture
def generator_inside() -> Iterator[None]:
    """For `pytest.mark.usefixtures`: loads are generated in the process of the tests, after a short warm-up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton_repo.load.load.spawn", Inside)
        patch.setattr(process, "WARM_UP_SECONDS", 0.02)
        yield
