"""Triton Python model of a certified cascade: its tiers in one process, and the watch over what was certified.

Its folder also holds the other files of this package, `cascade.json` (which `triton_repo.cascade.layout` writes), and a folder for each
tier: a whole model as it would be served alone. The dynamic batcher forms the batches of the first tier.

    TEXT ...  -->  LABEL, SCORE, LOGITS of the tier that answers, and TIER, INT32 [1]: its number, from 1
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it
shutil.rmtree(Path(__file__).parent / "__pycache__", ignore_errors=True)  # Python wrote this file's bytecode before its first line ran

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from .metrics import Metrics
from .tiers import Answer, Columns, InTurn, Tier, answer, load
from .watch import Watch

FOLDER = Path(__file__).parent


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the tiers, lets each answer a row of each length, and starts the watch."""
        config = json.loads(args["model_config"])
        settings = json.loads((FOLDER / "cascade.json").read_text(encoding="utf-8"))
        self.inputs = [value["name"] for value in config["input"]]
        name = args["model_name"]
        found = [load(FOLDER / tier["folder"], f"{name}.{tier['folder']}", config) for tier in settings["tiers"]]
        found[-1] = last = InTurn(found[-1])
        self.tiers = [Tier(model, tier["score"], tier["threshold"]) for model, tier in zip(found, settings["tiers"], strict=True)]
        for model in found:
            model.predict([self._warm_up(sample) for sample in settings["warm_up"]])
        labels = {"model": name, "version": args["model_version"], "instance": args["model_instance_name"].rpartition("_")[2]}
        self.metrics = Metrics(pb_utils.MetricFamily, labels)
        self.watch = Watch(last, settings["watch"], self.metrics, name)
        self.watch.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns one response for each request: its answers or an error."""
        columns = [[pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs] for request in requests]
        responses = []
        for given, found in zip(columns, answer(self.tiers, columns), strict=True):
            if not isinstance(found, Answer):
                responses.append(found)
                continue
            responses.append(found.response(TIER=found.tiers[:, None]))
            self.watch.note(given, found)
        return responses

    def finalize(self) -> None:
        """Ends the watch, and deletes its metrics."""
        self.watch.close()
        self.metrics.close()

    def _warm_up(self, sample: str) -> Columns:
        return [np.array([[(FOLDER / "warm_up" / f"{sample}.{name}").read_bytes()]], np.object_) for name in self.inputs]
