"""Serves the models of a deployed GPU repository without a network: run in a namespace of its own as
`python -m tests.triton_repo.gpu.serve_deployed REPOSITORY PACKAGES LOG`.

In the place of the plan stands a Python model that knows the golden rows. Prints one line of JSON.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from triton_repo import client, environment
from triton_repo.environment import ServerEnvironment
from triton_repo.gpu.plan_files import read_rows
from triton_repo.server import TritonServer

PLAN = """
import json, pathlib, sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        root = pathlib.Path(__file__).resolve().parents[3]
        golden, spec = np.load(root / "golden.npz"), json.loads((root / "gpu.json").read_text())
        self.inputs, self.known = spec["inputs"], {}
        for bucket in spec["buckets"]:
            for row, logits in enumerate(golden[f"{bucket}.logits"]):
                self.known[b"".join(golden[f"{bucket}.{name}"][row].tobytes() for name in self.inputs)] = logits
        print("numpy", np.__version__, file=sys.stderr)

    def execute(self, requests):
        print("batch", [pb_utils.get_input_tensor_by_name(r, self.inputs[0]).as_numpy().shape for r in requests], file=sys.stderr)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        arrays = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs]
        empty = np.zeros_like(next(iter(self.known.values())))
        rows = [self.known.get(b"".join(array[row].tobytes() for array in arrays), empty) for row in range(len(arrays[0]))]
        return pb_utils.InferenceResponse([pb_utils.Tensor("logits", np.stack(rows))])
"""


def stand_in(repository: Path) -> str:
    """Puts a Python model in the place of the plan; returns the name of the ensemble."""
    from tritonclient.grpc import model_config_pb2 as pb

    from triton_repo.config import from_text, to_text

    spec = json.loads((repository / "gpu.json").read_text())
    folder = repository / "models" / spec["models"]["plan"]
    config = from_text((folder / "config.pbtxt").read_text())
    for name in ("cc_model_filenames", "instance_group", "platform"):
        config.ClearField(name)
    config.backend = "python"
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
    (folder / "config.pbtxt").write_text(to_text(config))
    (folder / "1" / "model.py").write_text(PLAN)
    return str(spec["ensemble"])


def reaches_the_network() -> bool:
    """Whether a name or an address outside of this machine is reached."""
    try:
        socket.create_connection(("192.0.2.1", 80), 1).close()
    except OSError as error:
        return "unreachable" not in str(error)
    return True


def main(repository: Path, packages: Path, log: Path) -> None:
    """Serves the golden rows as they are, and prints what came back."""
    assert not reaches_the_network()
    found = environment.check()
    alone = ServerEnvironment(packages, found.python, found.site, found.libraries, found.versions)
    name = stand_in(repository)
    with TritonServer(repository / "models", alone, log, private=True) as server:
        answers = client.evaluate(server.grpc_address, name, read_rows(repository / "rows.json"), 8)
        again = client.evaluate(server.grpc_address, name, read_rows(repository / "rows.json"), 8)
        metrics = scraped(server.metrics_socket)
    assert (answers.logits == again.logits).all()
    print(json.dumps({"logits": answers.logits.tolist(), "labels": answers.labels, "scores": answers.scores.tolist(), "metrics": metrics}))


def scraped(address: Path) -> list[str]:
    """Returns the names of the metrics that Triton offers."""
    import http.client

    class Local(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.connect(str(address))

    connection = Local("localhost")
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return sorted({line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
