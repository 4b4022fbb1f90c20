"""A certified cascade beside OpenVINO with NNCF int8 of the whole model: engine time, rows per second and p99, in one run and in turns.

    compress run RECIPE --out RUN          a recipe with the stage cascade, one text a row, with OpenVINO among its engines
    python benchmarks/server/cascade_peer.py RUN [--bound 0.01 0.02] [--turns 3] [--seconds 5] [--also VARIANT] [--prepare] [--out FILE]

For each bound the path of the run is tested again on its stored certificate rows, so that all cascades have the same tiers. NNCF quantizes
the ordinary export of the original with its settings for Transformers, calibrated on 512 train rows.

    engine      p50 of each engine at 1x32 and 1x128, every engine in a process of its own, processes in turn; a cascade takes the sum over
                its tiers of (share of the judged rows that reach the tier) x p50. Judged rows are the evaluation rows of the run.
    saturation  rows per second behind Triton, 4 requests of 32 rows under way; all models are loaded, one is asked at a time
    alone       p99 behind Triton of one request of one row after the other, of the cascades and of each tier served alone
    answers     judged rows behind Triton and certificate rows that are answered otherwise than by the original in torch

Aims are times as shares of NNCF's, for bounds of 1 % and 2 %: 0.60 and 0.45 at 1x128, 0.75 and 0.60 at 1x32, 0.70 and 0.55 at saturation;
and a p99 of at most the earlier tiers' plus 1.1 times the last tier's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.reading.certified import with_certify
from compress.reading.load import load_data
from compress.recipe import check
from compress.report import evaluations
from compress.run.opened import opened
from export.cascade.certificate import alpha_of
from export.cascade.path import path
from export.cascade.stored import load
from export.cascade.tested import Answers, Bounds, certify_path, escalations
from export.engines.spec import EngineSpec, spec_of
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.cascade import FILE, Cascade
from foundation.artifacts.document import read
from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.run_folder import open_run
from foundation.core.arrays import Array
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Data
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_logits
from foundation.measure.engine_process import EngineProcess
from foundation.measure.fastest import Key
from foundation.measure.latency import measure
from foundation.models.config import label_names
from foundation.standalone.confidence import confidence, route
from parts.served_model import in_turns, median, ratio
from triton_repo import environment, layout
from triton_repo.cascade.layout import NAME, cascade_of, write_cascade
from triton_repo.cascade.settings import Audit
from triton_repo.client import evaluate
from triton_repo.config import Scheduling
from triton_repo.load.connection import Address
from triton_repo.load.load import examine, load_test
from triton_repo.load.settings import Load
from triton_repo.service import Service

PEER, CALIBRATION_ROWS = "nncf-int8", 512
LENGTHS = (32, 128)
AIMS: Mapping[float, Mapping[str, float]] = {
    0.01: {"1x128": 0.60, "1x32": 0.75, "saturation": 0.70},
    0.02: {"1x128": 0.45, "1x32": 0.60, "saturation": 0.55},
}
MANY, UNDER_WAY = 32, 4
LAST_TIER = 1.1


@dataclass(frozen=True)
class Subject:
    """A run with a cascade."""

    folder: Path
    document: Cascade
    certified: Answers
    """Answers to the certificate rows."""
    exported: Artifact
    engines: Mapping[Key, tuple[Build, Engine]]
    judged: Answers
    """Answers of the engines to the evaluation rows."""
    data: Data
    target: Any

    @classmethod
    def of(cls, folder: Path) -> Subject:
        """Opens a finished run."""
        run, found = open_run(folder), opened(folder)
        made, exported = run.of_kind("cascade"), run.of_kind("engine")
        if made is None or exported is None:
            raise SystemExit(f"{folder}: this run has no cascade; give one whose recipe has the stage cascade")
        document, recipe = read(Cascade, made.path / FILE), check(found.recipe)
        engines = {build.key(entry): (build, entry) for build in evaluations.exported(run).builds for entry in build.engines}
        logits = [load_logits(exported.path / str(engines[tier.key][1].predictions)) for tier in document.tiers]
        task = recipe.model.task
        judged = Answers(task, load_logits(run.predictions(run.baseline)), logits)
        names, quiet = label_names(recipe.model), ConsoleProgress("quiet")
        data = with_certify(load_data(recipe.data, task, names, quiet.log), recipe.data, task, quiet.log, numbered=names is not None)
        certified, _ = load(made.path / document.certificate.predictions, task)
        return cls(made.path, document, certified, exported, engines, judged, data, recipe.target)

    def at(self, bound: float) -> Cascade:
        """Returns the cascade that the stored predictions certify for a bound."""
        found, task = self.document, self.certified.task
        chosen_on, _ = load(self.folder / found.certificate.path.predictions, task, found.certificate.distance)
        tested_on, keys = load(self.folder / found.certificate.predictions, task, found.certificate.distance)
        scores = [tier.score.score for tier in found.tiers if tier.score is not None]
        known = chosen_on.seen(scores, [float(tier.cost_ms) for tier in found.tiers])
        points, alpha = path(known), alpha_of(float(found.certificate.confidence))
        times = [known.time_ms(point) for point in points]
        walk = certify_path(tested_on, tested_on.seen(scores, known.cost_ms), points, times, Bounds(bound, alpha), keys)
        if walk.chosen is None:
            raise SystemExit(f"{self.folder}: no point of the path passes at a bound of {bound:g}")
        point = walk.points[walk.chosen]
        tiers = [tier.with_(threshold=level) for tier, level in zip(found.tiers, (*point.thresholds, None), strict=True)]
        certificate = found.certificate.with_(bound=bound, disagreements=point.disagreements, p_value=point.p_value)
        return found.with_(tiers=tuple(tiers), certificate=certificate, escalation=escalations(walk, len(keys), alpha))

    def reaching(self, document: Cascade, answers: Answers) -> list[float]:
        """Returns the share of rows that each tier is asked about; 0 of a tier that keeps none."""
        answering = self.answering(document, answers)
        return [
            0.0 if tier.score is not None and tier.threshold is None else float((answering >= number).mean())
            for number, tier in enumerate(document.tiers)
        ]

    def answering(self, document: Cascade, answers: Answers) -> Array:
        """Returns the number of the tier that answers each row, from 0, int64 [n]."""
        tiers = [tier for tier in document.tiers if tier.score is not None]
        scores = [confidence(one, tier.score.score) for one, tier in zip(answers.tiers, tiers, strict=False) if tier.score is not None]
        return route(scores, [None if tier.threshold is None else float(tier.threshold) for tier in tiers])

    def spec(self, key: Key) -> EngineSpec:
        """Returns how the engine of a tier is opened."""
        return spec_of(self.exported.path, *self.engines[key], self.target)


def peer(subject: Subject, out: Path) -> tuple[EngineSpec, EngineSpec]:
    """Returns NNCF's int8 of the whole model and its float original, both in OpenVINO with static shapes."""
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # the other `parts`
    from parts.peer_engines import nncf_int8, ordinary_export

    last = subject.document.tiers[-1]
    key = (last.variant, "fp32", "fp32", "openvino", "static")
    if key not in subject.engines:
        raise SystemExit("the original was not built for OpenVINO with static shapes; name openvino in target.engines")
    plain, run = subject.spec(key), open_run(subject.folder.parent.parent)
    folder = Path(plain.folder)
    out.mkdir(parents=True, exist_ok=True)
    onnx, quantized = out / "ordinary.onnx", out / "nncf.xml"
    if not quantized.exists():
        onnx = ordinary_export(run.variants[last.variant].path, folder, onnx)
        quantized = nncf_int8(onnx, folder, subject.data.calibration(CALIBRATION_ROWS, 0).rows, quantized)
    return replace(plain, path=str(quantized), precision="int8"), replace(plain, path=str(onnx))


def engine_times(subject: Subject, others: Mapping[str, EngineSpec]) -> dict[str, dict[str, float]]:
    """Returns the p50 in ms of every engine at each shape, by name."""
    specs = {**others, **{f"tier {tier.number}": subject.spec(tier.key) for tier in subject.document.tiers}}
    found: dict[str, dict[str, float]] = {name: {} for name in specs}
    for job, row in measure(list(specs.values()), [(1, length) for length in LENGTHS], ConsoleProgress()):
        assert row.p50_ms is not None, "every engine runs"
        found[list(specs)[job]][f"1x{row.sequence}"] = float(row.p50_ms)
    return found


def repository(subject: Subject, cascades: Mapping[str, Cascade], nncf: EngineSpec, out: Path) -> list[str]:
    """Writes NNCF's model, each tier alone and the cascades; returns the names of the tiers' models."""
    tiers = list(cascade_of(subject.exported, subject.document).tiers)
    last = tiers[-1]
    entry = last.engine.with_(engine=nncf.engine, mode=nncf.mode, file=nncf.path, properties=dict(nncf.properties))
    whole = replace(last, name=PEER, precision="int8", engine=entry)
    about = {"pairs": False, "batch_sizes": subject.target.batch_sizes, "max_batch_size": MANY, "scheduling": Scheduling()}
    layout.write_repository(out, [whole, *tiers], **about)
    for name, document in cascades.items():
        write_cascade(out, cascade_of(subject.exported, document), Audit(), **about)
        (out / NAME).rename(out / name)
    return [tier.name for tier in tiers]


def served(
    subject: Subject, cascades: Mapping[str, Cascade], tiers: Sequence[str], out: Path, given: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Returns `saturation`, `alone` and `answers` of every model."""
    rows, original = list(subject.data.evaluation.rows), subject.judged.original
    with Service(out / "repository", environment.check(), out / "triton.log") as running:
        server = Address("grpc", running.grpc_address)

        def loaded(name: str, load: Load) -> Callable[[], dict[str, Any]]:
            return lambda: dict(load_test(server, examine(server, name), rows, [load])[0])

        answers = {}
        for name in (PEER, *cascades):
            found = evaluate(running.grpc_address, name, rows, UNDER_WAY)
            other = int((found.logits.argmax(axis=1) != original.argmax(axis=1)).sum())
            by_tier = None if found.tiers is None else np.bincount(found.tiers, minlength=len(tiers) + 1)[1:].tolist()
            answers[name] = {"otherwise": other, "n": len(rows), "rows_per_tier": by_tier}
        many = Load(concurrency=UNDER_WAY, rows=MANY, seconds=given.seconds)
        full = in_turns({name: loaded(name, many) for name in (PEER, *cascades)}, given.turns)
        one = Load(concurrency=1, seconds=given.seconds)
        alone = in_turns({name: loaded(name, one) for name in (PEER, *cascades, *tiers)}, given.turns)
    for turns in alone.values():
        for turn in turns:
            turn |= {f"{name}_ms": turn["latency_ms"][name] for name in ("p50", "p99")}
            if turn["p99_ms"] is None:
                raise SystemExit(f"{len(rows)} rows, {turn['n']} requests in a turn: too few for a p99; give more --seconds")
    return {"answers": answers, "saturation": full, "alone": alone}


def judged(subject: Subject, document: Cascade, times: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns the engine time of a cascade at the live mix, and the shares it follows from."""
    reaching, certificate = subject.reaching(document, subject.judged), document.certificate
    found: dict[str, Any] = {
        "certificate": f"{certificate.disagreements} of {certificate.n} certificate rows otherwise",
        "escalated, certificate rows": [round(float(one.rate), 4) for one in document.escalation],
        "reaching each tier, judged rows": [round(one, 4) for one in reaching],
        "judged rows": len(subject.judged.original),
        "thresholds": [tier.threshold for tier in document.tiers],
    }
    for shape, peer_ms in times[PEER].items():
        mean = sum(share * times[f"tier {tier.number}"][shape] for share, tier in zip(reaching, document.tiers, strict=True))
        found[shape] = {"ms": round(mean, 3), "of NNCF": round(mean / peer_ms, 3)}
    return found


def verdicts(bound: float, name: str, found: Mapping[str, Any], loads: Mapping[str, Any], tiers: Sequence[str]) -> dict[str, Any]:
    """Returns each figure of a cascade next to its aim."""
    aims, alone = AIMS.get(bound, {}), loads["alone"]
    full = ratio(loads["saturation"][PEER], loads["saturation"][name])
    limits = [
        sum(one["p99_ms"] for one in before) + LAST_TIER * last["p99_ms"]
        for *before, last in zip(*(alone[tier] for tier in tiers), strict=True)
    ]
    shares = [round(one["p99_ms"] / limit, 3) for one, limit in zip(alone[name], limits, strict=True)]
    return {
        **{shape: {"of NNCF": found[shape]["of NNCF"], "aim": aims.get(shape)} for shape in ("1x128", "1x32")},
        "saturation": {"of NNCF": full["median"], "turns": full["turns"], "aim": aims.get("saturation")},
        "p99 over its limit": {"median": float(np.median(shares)), "turns": shares, "aim": 1.0},
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--bound", type=float, nargs="+", default=[0.01, 0.02])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--work", type=Path, default=Path("runs/cascade-peer"), help="where NNCF's model and the repository are written")
    parser.add_argument("--also", nargs="*", default=[], metavar="VARIANT", help="time its float build in OpenVINO, too")
    parser.add_argument("--prepare", action="store_true", help="only make NNCF's model, which the next call with this --work takes")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    subject = Subject.of(given.run.resolve())
    cascades = {f"cascade-{bound:g}": subject.at(bound) for bound in given.bound}
    nncf, plain = peer(subject, given.work.resolve())
    if given.prepare:
        return
    with EngineProcess(nncf) as process:
        assert subject.data.certify is not None, "a cascade has certificate rows"
        answers = process.predict(subject.data.certify.rows, nncf.evaluation_batch)
    other = int((answers.argmax(axis=1) != subject.certified.original.argmax(axis=1)).sum())
    tiers = repository(subject, cascades, nncf, given.work.resolve() / "repository")
    more = {name: subject.spec((name, "fp32", "fp32", "openvino", "static")) for name in given.also}
    times = engine_times(subject, {PEER: nncf, "OpenVINO fp32": plain, **more})
    found = {name: judged(subject, document, times) for name, document in cascades.items()}
    if given.out is not None:
        given.out.write_text(json.dumps({"p50_ms": times, "cascades": found}, indent=1) + "\n", encoding="utf-8")
    loads = served(subject, cascades, tiers, given.work.resolve(), given)
    if given.out is not None:
        given.out.write_text(json.dumps({"p50_ms": times, "cascades": found, "loads": loads}, indent=1) + "\n", encoding="utf-8")
    document = {
        "environment": fingerprint(),
        "tiers": [f"{tier.variant} in {tier.precision}, {tier.engine} {tier.mode}" for tier in subject.document.tiers],
        "AUROC": subject.document.written()["scores"],
        "scores": [tier.score.name for tier in subject.document.tiers if tier.score is not None],
        "NNCF, certificate rows answered otherwise": f"{other} of {len(answers)}",
        "p50_ms": times,
        "cascades": found,
        "answers": loads["answers"],
        "rows_per_s": {name: median(turns, "rows_per_s") for name, turns in loads["saturation"].items()},
        "alone_ms": {name: {one: median(turns, f"{one}_ms") for one in ("p50", "p99")} for name, turns in loads["alone"].items()},
        "against the aims": {
            name: verdicts(bound, name, found[name], loads, tiers) for bound, name in zip(given.bound, cascades, strict=True)
        },
    }
    print(json.dumps(document, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps({**document, "loads": loads}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
