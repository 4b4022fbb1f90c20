"""Loads the model of a kernel repository as the server does, in a process that has nothing of ours but the folder of the model.

python serve_kernels.py VERSION_FOLDER CONFIG_JSON TEXT ...      prints {"logits": [[...]], "labels": [...], "vectors": [[...]], ...}
"""

import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

ABSENT = (
    "transformers",
    "pydantic",
    "psutil",
    "onnx",
    "onnxruntime",
    "openvino",
    "datasets",
    "tritonclient",
    "google",
    "quantize",
    "prune",
)


class Absent(MetaPathFinder):
    """What a server does not have."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> None:
    folder, config, *texts = sys.argv[1:]
    sys.meta_path.insert(0, Absent())
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from backend_stand_in import Tensor, stand_in

    sys.modules["triton_python_backend_utils"] = stand_in()
    sys.path[0] = folder
    import numpy as np
    from model import TritonPythonModel

    model = TritonPythonModel()
    model.initialize({"model_config": config, "model_instance_kind": "CPU", "model_instance_device_id": "0"})
    requests = [{"TEXT": Tensor("TEXT", np.array([[text.encode()]], object))} for text in texts]
    answers = model.execute(requests)
    errors = [str(answer.error) for answer in answers if answer.error is not None]
    ours = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in ("compress", "export", "engine")}
    print(json.dumps({
        "errors": errors,
        "logits": [answer.tensors["LOGITS"][0].tolist() for answer in answers if "LOGITS" in answer.tensors],
        "labels": [answer.tensors["LABEL"][0, 0].decode() for answer in answers if "LABEL" in answer.tensors],
        "vectors": [answer.tensors["VECTOR"][0].tolist() for answer in answers if "VECTOR" in answer.tensors],
        "outside": [file for file in ours.values() if not Path(file).is_relative_to(folder)],
        "modules": sorted(ours),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
