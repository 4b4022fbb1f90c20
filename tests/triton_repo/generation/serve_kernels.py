"""Loads the model of a repository on our kernels as the server does, in a process that has nothing of ours but the folder of the model.

python serve_kernels.py VERSION_FOLDER CONFIG_JSON SCENES_JSON      prints what it answered, as JSON

Scenes: `alone` and `together`, requests one after the other and at once; `cancelled`, one whose client leaves after its first piece;
`wrong`, requests that are refused. A request is its inputs by name. The model has two instances, on GPUs 0 and 1 by what the server says.
"""

import importlib
import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

ABSENT = ("transformers", "pydantic", "psutil", "onnx", "onnxruntime", "openvino", "openvino_genai", "datasets", "tritonclient", "google")
OURS = ("compress", "export", "foundation", "triton_repo", "quantize", "prune", "distill")
SECONDS = 240
INTS = ("MAX_TOKENS", "TOP_K", "BEAMS")


class Absent(MetaPathFinder):
    """What a server does not have."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> None:
    folder, config, scenes = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    sys.meta_path.insert(0, Absent())
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import backend_stand_in as stand_in

    sys.modules["triton_python_backend_utils"] = stand_in.stand_in()
    sys.path[0] = str(folder.parent)
    sys.path.insert(0, str(folder / "packages"))
    import numpy as np

    module = importlib.import_module(f"{folder.name}.model")  # first, as in the server: it keeps Python from writing into its folder
    from export.fused import runner

    ordinals, device_here = [], runner.device_here
    runner.device_here = lambda ordinal=None: (ordinals.append(ordinal), device_here(ordinal))[1]

    def opened(ordinal):
        model = module.TritonPythonModel()
        model.initialize({"model_config": config, "model_instance_kind": "GPU", "model_instance_device_id": str(ordinal)})
        return model

    def request(inputs):
        arrays = {}
        for name, value in inputs.items():
            if isinstance(value, str):
                arrays[name] = np.array([value.encode()], object)
            elif isinstance(value, list):
                arrays[name] = np.array(value, np.int64)
            else:
                arrays[name] = np.array([value], bool if isinstance(value, bool) else np.int32 if name in INTS else np.float32)
        return stand_in.Request(**arrays)

    def result(sender):
        assert sender.last.wait(SECONDS), "no last response"
        *_, last = sender.responses
        if last.error is not None:
            return {"error": str(last.error), "code": last.error.code, "responses": len(sender.responses)}
        pieces = [response.tensors for response in sender.responses]
        return {
            "tokens": [int(token) for piece in pieces for token in piece["TOKENS"]],
            "text": b"".join(piece["TEXT"][0] for piece in pieces).decode(),
            "reason": pieces[-1]["FINISH_REASON"][0].decode(),
            "prompt": int(pieces[-1]["PROMPT_TOKENS"][0]),
            "pieces": len(pieces),
        }

    def asked(model, inputs):
        one = request(inputs)
        model.execute([one])
        return one.sender

    first, second = opened(0), opened(1)
    found = {"alone": [result(asked(first, inputs)) for inputs in scenes["alone"]]}
    late = iter(scenes["together"])
    senders = [asked(first, next(late))]
    assert senders[0].first.wait(SECONDS), "no first response"  # the others come while it is written
    senders += [asked(first, inputs) for inputs in late]
    found["together"] = [result(sender) for sender in senders]
    leaving = asked(first, scenes["cancelled"])
    assert leaving.first.wait(SECONDS), "no first response"
    leaving.cancelled = True
    found["cancelled"] = result(leaving)
    found["wrong"] = [result(asked(first, inputs)) for inputs in scenes["wrong"]]
    found["elsewhere"] = result(asked(second, scenes["alone"][0]))
    engine = first.model.engine
    found["left"] = [engine.running, engine._texts.lengths, engine._pages.fits([engine._pages._context] * engine._room)]
    for model in (first, second):
        model.finalize()
    ours = {name: str(loaded.__file__) for name, loaded in sys.modules.items() if name.partition(".")[0] in OURS}
    found["outside"] = [file for file in ours.values() if not Path(file).is_relative_to(folder)]
    print(json.dumps({**found, "modules": sorted(ours), "ordinals": ordinals, "warnings": stand_in.Logger.warnings}))


if __name__ == "__main__":
    main()
