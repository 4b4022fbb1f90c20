"""Questions to a running server, over gRPC or HTTP: is it there, does it serve what a repository holds, and are its answers right?

It only asks what every Triton offers to clients: health, metadata and inference. So it works behind `compress serve`, in a container and on
another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from tritonclient.grpc import model_config_pb2 as pb
from tritonclient.utils import InferenceServerException

from foundation.core.errors import InputError, Problem
from foundation.core.shown import reason
from foundation.standalone.preprocess import Preprocessor, Row
from triton_repo.client import REQUEST_SECONDS, Answers, tensors
from triton_repo.config import from_text
from triton_repo.load import access
from triton_repo.load.connection import Address

SECONDS = 10.0


class Probe:
    """A connection to a server; a context manager.

    Args:
        address: The server.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        if address.protocol == "http":
            from tritonclient.http import InferenceServerClient, InferInput

            self._client = InferenceServerClient(
                address.place,
                connection_timeout=SECONDS,
                network_timeout=REQUEST_SECONDS,
                ssl=address.tls,
                ssl_options={"ca_certs": address.ca} if address.ca else None,
            )
            self._limit: dict[str, float] = {}
            self._described: dict[str, float | bool] = {}
        else:
            from tritonclient.grpc import InferenceServerClient, InferInput

            self._client = InferenceServerClient(address.place, creds=access.credentials(address.ca) if address.tls else None)
            self._limit = {"client_timeout": SECONDS}
            self._described = {"as_json": True, **self._limit}
        self._tensor = InferInput
        if (plugin := access.plugin()) is not None:
            self._client.register_plugin(plugin)

    def __enter__(self) -> Self:
        """Checks that the server is live and ready.

        Raises:
            InputError: It is not, or cannot be reached.
        """
        for asked, what in ((self._client.is_server_live, "live"), (self._client.is_server_ready, "ready")):
            try:
                fine = asked(**self._limit)
            except (InferenceServerException, OSError) as error:
                raise InputError(
                    f"--url {self.address}", f"no answer ({_line(error)})", remedy="give the address of a running server"
                ) from error
            if not fine:
                raise InputError(f"--url {self.address}", f"answers, but it is not {what}", remedy="wait until it has loaded its models")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the connection."""
        self._client.close()

    def about(self) -> str:
        """Returns name and version of the server.

        Raises:
            InputError: It does not say, such as one that asks for a key.
        """
        try:
            found = self._client.get_server_metadata(**self._described)
        except (InferenceServerException, OSError) as error:
            if isinstance(error, InferenceServerException) and error.status() in access.REFUSED:
                raise access.refused(f"--url {self.address}") from error
            raise InputError(f"--url {self.address}", f"does not say what it is ({_line(error)})", remedy="give a Triton server") from error
        return f"{found['name']} {found['version']}"

    def has(self, name: str) -> bool:
        """Whether the server has loaded a model."""
        try:
            return bool(self._client.is_model_ready(name, **self._limit))
        except (InferenceServerException, OSError):
            return False

    def differences(self, model: Path, name: str | None = None) -> list[Problem]:
        """Returns a problem for each way in which the server does not serve a model of a repository: absent, or other tensors.

        Args:
            model: Folder of the model.
            name: What it is called there; None: as in the repository.
        """
        config = from_text((model / "config.pbtxt").read_text(encoding="utf-8"))
        name = config.name if name is None else name
        try:
            found = self._client.get_model_metadata(name, **self._described)
        except (InferenceServerException, OSError) as error:
            return [Problem(name, f"{self.address} does not serve it ({_line(error)})")]
        problems = []
        for side in ("inputs", "outputs"):
            wanted = {one.name: described(one) for one in getattr(config, side.removesuffix("s"))}
            given = {one["name"]: f"{one['datatype']} {[int(axis) for axis in one['shape']]}" for one in found.get(side, [])}
            problems += [
                Problem(config.name, f"{side[:-1]} {name}: {given.get(name, 'missing')}", f"{wanted.get(name, 'none')} expected")
                for name in sorted(wanted.keys() | given.keys())
                if wanted.get(name) != given.get(name)
            ]
        return problems

    def answers(self, model: str, rows: Sequence[Row]) -> Answers:
        """Sends every row once, one after the other.

        Raises:
            InputError: A request failed.
        """
        results = []
        for index, row in enumerate(rows):
            try:
                results.append(self._client.infer(model, tensors([row], self._tensor)))
            except (InferenceServerException, OSError) as error:
                raise InputError(model, f"row {index} of {len(rows)} has no answer ({_line(error)})") from error
        return Answers.of(results, rows)

    def contradictions(self, model: Path, answers: Answers) -> list[Problem]:
        """Returns a problem for each kind of output that does not follow from the logits: types, labels and scores.

        Args:
            model: Folder of the model.
            answers: Its answers.
        """
        given = {"what the engine computed": answers.logits, **answers.outputs}
        numbers = {name: values for name, values in given.items() if values.dtype != np.object_}
        problems = [
            Problem(model.name, f"{name} is {values.dtype}", "float32 expected")
            for name, values in numbers.items()
            if values.dtype != np.float32
        ]
        wrong = answers.contradiction(prepared_of(model))
        return problems if wrong is None else [*problems, Problem(model.name, wrong)]


def prepared_of(model: Path) -> Preprocessor:
    """Returns the preprocessor of the newest version of a model of a repository."""
    versions = [path for path in model.iterdir() if path.name.isdigit()]
    return Preprocessor.load(max(versions, key=lambda path: int(path.name)))


def described(tensor: pb.ModelInput | pb.ModelOutput) -> str:
    """Returns datatype and shape of a tensor of a `ModelConfig`, as a server reports it: with the axis of the batch."""
    name = pb.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return f"{'BYTES' if name == 'STRING' else name} {[-1, *tensor.dims]}"


def _line(error: Exception) -> str:
    """Returns an error as one line."""
    return reason(Exception(error.message() or error.status()) if isinstance(error, InferenceServerException) else error, 300)
