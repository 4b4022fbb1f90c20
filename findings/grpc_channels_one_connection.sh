#!/usr/bin/env bash
# tritonclient 2.73.0, grpcio 1.85.1: eight gRPC clients of one process are one connection. The guess was a connection for each client, as each
# client of tritonclient.http has, so that a load test with eight clients tries eight connections.
#
# Seen (2026-11-28): channels of the same address with the same options share their connection, in one pool for the process. Eight clients in eight
# threads are one peer of the server. Where a server or a proxy allows 2 requests at a time on a connection (100 are usual), 2 of 8 run, and the
# others wait in the client without a message; behind a balancer of connections all load goes to one server. The option
# grpc.use_local_subchannel_pool gives each client a connection of its own, and all 8 run. It goes into `channel_args`, which replace the
# options for message sizes that the client has otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq "tritonclient[grpc,http]==2.73.0" grpcio==1.85.1
"$folder/venv/bin/python" - <<'PYTHON'
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import grpc
from tritonclient.grpc import InferenceServerClient, service_pb2, service_pb2_grpc

CLIENTS, LIMIT, PATIENCE = 8, 2, 3.0


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers once as many requests as there are clients have arrived together, or after some seconds."""

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.together, self.most = 0, 0
        self.changed = threading.Condition()

    def ServerLive(self, request: service_pb2.ServerLiveRequest, context: grpc.ServicerContext) -> service_pb2.ServerLiveResponse:  # noqa: N802
        with self.changed:
            self.peers.add(context.peer())
            self.together += 1
            self.most = max(self.most, self.together)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most == CLIENTS, timeout=PATIENCE)
            self.together -= 1
        return service_pb2.ServerLiveResponse(live=True)


def measured(arguments: list[tuple[str, int]] | None) -> tuple[int, int]:
    """Connections, and the most requests that were in the server at a time."""
    server, seen = grpc.server(ThreadPoolExecutor(CLIENTS), options=[("grpc.max_concurrent_streams", LIMIT)]), Server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(seen, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    clients = [InferenceServerClient(f"127.0.0.1:{port}", channel_args=arguments) for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(lambda client: client.is_server_live(), clients))
    for client in clients:
        client.close()
    server.stop(None).wait()
    return len(seen.peers), seen.most


print(f"tritonclient {version('tritonclient')}, grpcio {version('grpcio')}, {CLIENTS} clients, {LIMIT} streams a connection")
usual, local = measured(None), measured([("grpc.use_local_subchannel_pool", 1)])
print(f"usual: connections and requests at a time {usual}; with a pool of subchannels for each channel: {local}")
assert usual == (1, LIMIT) and local == (CLIENTS, CLIENTS), "the behaviour has changed"
PYTHON
