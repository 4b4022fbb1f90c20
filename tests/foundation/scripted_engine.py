"""An engine process that plays a script: what tests of its parent talk to. Run as a program: name, log file, milliseconds per sample."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Scripted:
    """A job whose process is this file."""

    name: str
    log: Path
    milliseconds: float = 1.0
    threads: int = 1

    @property
    def labels(self) -> dict[str, str]:
        return {"engine": self.name, "mode": "static", "precision": "int8", "float_precision": "fp32", "device": "cpu"}

    @property
    def command(self) -> list[str]:
        return [sys.executable, __file__, self.name, str(self.log), str(self.milliseconds)]

    def message(self) -> dict[str, Any]:
        return {"name": self.name}


def play(name: str, log: Path, milliseconds: float) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        with log.open("a") as file:
            file.write(json.dumps({"name": name, **request}) + "\n")
        reply: dict[str, Any] = {"versions": {"scripted": "1"}}
        if request["op"] == "measure":
            count = 0
            while count < request["most"] and (count < request["least"] or count * milliseconds / 1e3 < request["seconds"]):
                count += 1
            device = "cpu" if name != "elsewhere" else "cuda"
            placement = {"device": device, "provider": "played", "float_precision": "bf16" if name == "halved" else "fp32"}
            reply = {"samples_ms": [milliseconds + index / 1e6 for index in range(count)], "came_first": False, "peak_memory_bytes": 12345}
            reply["placement"] = placement
        if request["op"] == "fail":
            reply = {"error": "RuntimeError: no such kernel"}
        if request["op"] == "crash" or name == "unopenable":
            print("a warning\nSegmentation fault of the library", file=sys.stderr)
            sys.exit(9)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    play(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
