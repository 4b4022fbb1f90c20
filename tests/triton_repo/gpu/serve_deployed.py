"""Serves the models of a deployed GPU repository without a network: run in a namespace of its own as
`python -m tests.triton_repo.gpu.serve_deployed REPOSITORY PACKAGES LOG`.

In the place of the plan stands a Python model that knows the golden rows. Every row is sent twice; with Triton's local cache, as the images
start it, the second answer comes from there. Prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from triton_repo import client, environment
from triton_repo import server as servers
from triton_repo.environment import ServerEnvironment
from triton_repo.gpu.plan_files import read_rows
from triton_repo.server import TritonServer

DOCKERFILE = Path(__file__).resolve().parents[3] / "docker" / "Dockerfile"
HITS, MISSES, RUNS = "nv_cache_num_hits_per_model", "nv_cache_num_misses_per_model", "nv_inference_exec_count"
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


def with_cache(command_line: Callable[..., list[str]], caches: Path) -> Callable[..., list[str]]:
    """Returns `command_line` of a server that has the cache of `docker/Dockerfile`."""
    option = re.search(r"--cache-config=[^\"]+", DOCKERFILE.read_text())
    assert option is not None
    return lambda *given: [*command_line(*given), f"--cache-directory={caches}", option[0]]


def main(repository: Path, packages: Path, log: Path) -> None:
    """Serves the golden rows as they are, and prints what came back."""
    assert not reaches_the_network()
    found = environment.check()
    alone = ServerEnvironment(packages, found.python, found.site, found.libraries, found.versions)
    name = stand_in(repository)
    servers.command_line = with_cache(servers.command_line, found.binary.parents[1] / "caches")
    with TritonServer(repository / "models", alone, log, private=True) as server:
        answers = client.evaluate(server.grpc_address, name, read_rows(repository / "rows.json"), 8)
        first = scraped(server.metrics_socket)
        again = client.evaluate(server.grpc_address, name, read_rows(repository / "rows.json"), 8)
        second = scraped(server.metrics_socket)
    assert (answers.logits == again.logits).all()
    labels, others = ([label.decode() for label in found.outputs["LABEL"][:, 0]] for found in (answers, again))
    assert labels == others
    told = {"logits": answers.logits.tolist(), "labels": labels, "scores": answers.outputs["SCORE"][:, 0].tolist()}
    counts = {key: [sums(text, key) for text in (first, second)] for key in (HITS, MISSES, RUNS)}
    print(json.dumps({**told, "metrics": sorted({name_of(line) for line in second}), "model": name, "counts": counts}))


def scraped(address: Path) -> list[str]:
    """Returns the lines of the metrics that Triton offers."""
    import http.client

    class Local(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.connect(str(address))

    connection = Local("localhost")
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def name_of(line: str) -> str:
    """Returns the name of the metric of a line."""
    return line.split("{")[0].split(" ")[0]


def sums(lines: list[str], name: str) -> dict[str, float]:
    """Returns the values of a metric by model."""
    found = {}
    for line in lines:
        if name_of(line) == name:
            model = re.search(r'model="([^"]+)"', line)
            assert model is not None, line
            found[model[1]] = float(line.rsplit(" ", 1)[1])
    return found


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
