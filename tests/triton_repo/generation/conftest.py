from collections.abc import Iterator

import pytest

from tests.export.conftest import interpreted as interpreted  # a fixture
from tests.triton_repo.generation.served_language import language_server
from triton_repo.service import Service


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The models of `served_language`, started once."""
    with language_server(tmp_path_factory.mktemp("gr\u00f6\u00dfe")) as started:
        yield started
