"""The list of models that clients get: the names of the served repository that are ready.

Triton's own list shares its protocol with loading and unloading, which is closed. So the front knows the names and asks whether each is
ready.
"""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as rpc

from triton_repo.front.limits import REQUEST_SECONDS


async def ready_models(stub: rpc.GRPCInferenceServiceStub, models: Sequence[str]) -> pb.RepositoryIndexResponse:
    """Returns the `RepositoryIndexResponse` with the models that are ready.

    Args:
        stub: Triton.
        models: Names of all models of the repository.
    """
    answer = pb.RepositoryIndexResponse()
    for name in models:
        found = await stub.ModelReady(pb.ModelReadyRequest(name=name), timeout=REQUEST_SECONDS)
        if found.ready:
            answer.models.add(name=name, state="READY")
    return answer
