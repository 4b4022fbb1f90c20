"""ONNX export with Q/DQ and the engines built from it, one engine a file.

OpenVINO tells Google Analytics that it was imported, unasked, from a process that it forks in a thread. With us it does not: whom a run
serves is nobody's business, and such a process waits for ever, outliving its parent, where that is reading its standard input.

ONNX Runtime 1.31 tells Microsoft, on Linux too, and keeps an id of the machine in the home folder, unless a variable forbids it
before it is imported.
"""

import os
import sys

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # not to be found: OpenVINO then takes its stub
