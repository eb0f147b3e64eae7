"""`make test-zoo`: stock models of several libraries through every family and both formats.

For each model, in a process of its own: the submodels of all families, `full` as ONNX and as TFLite
with verification, and one other family as ONNX. The results are kept in a file, so that an
interrupted run goes on. The table of the documentation is written from it.
"""

import argparse
import json
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

import edgetailor as et
from exporters.recording.capture import SharedRecording
from toolkit.submodels.global_model import from_model
from toolkit.submodels.submodel import Submodel
from zoo_models import MODELS, ZooModel

SPECS = ("full", "low-rank:0.5,keep=0", "slice:0.6", "width:0.5", "cp:2.0")
FAMILIES = [spec.partition(":")[0] for spec in SPECS]
GOALS = {"onnx": 57, "tflite": 54, "low-rank": 55, "slice": 54, "width": 48, "cp": 60}
"""How many models have to pass; `other` is one family beside `full`, as ONNX."""
COLUMNS = ("onnx", "tflite", *FAMILIES[1:], "other")
PAGE = Path("docs/reference/models.md")
BATCH = 4
LONGEST = 3600
"""Seconds that one model may take."""

Row = dict[str, Any]


def attempt(row: Row, column: str, work: Callable[[], Any]) -> Any:
    """Do `work` and note in `row` what came of it and its processor time."""
    start = time.process_time()
    try:
        result = work()
        row[column] = "yes"
    except Exception as error:  # one model's failure must not end the others'
        result = None
        row[column] = f"{getattr(error, 'code', type(error).__name__)}: {error}"
    row.setdefault("seconds", {})[column] = round(time.process_time() - start, 2)
    return result


def examine(model: ZooModel, number: int, folder: Path) -> Row:
    """All results of one model."""
    torch.manual_seed(0)
    net = model.make()
    row: Row = {
        "name": model.name,
        "kind": model.kind,
        "library": model.library,
        "params": sum(p.numel() for p in net.parameters()),
    }
    training = et.TrainingConfig(batch_size=BATCH)
    submodels: dict[str, Submodel | None] = {}
    with SharedRecording(net, model.shape):
        for family, spec in zip(FAMILIES, SPECS, strict=True):
            submodels[family] = attempt(
                row, family, lambda spec=spec: et.split(net, spec, model.shape, training)
            )
    full = submodels["full"]
    if full is None:
        return row
    row["shares"] = {
        family: round(submodel.counts.capacity(full.counts), 2)
        for family, submodel in submodels.items()
        if submodel is not None
    }
    state = from_model(net)
    possible = [
        submodel
        for family, submodel in submodels.items()
        if submodel is not None and family != "full"
    ]
    cases = {"onnx": (full, "onnx"), "tflite": (full, "tflite")}
    if possible:
        other = possible[number % len(possible)]
        row["beside"] = str(other.spec)
        cases["other"] = (other, "onnx")
    for column, (submodel, form) in cases.items():
        out = folder / model.name / column
        attempt(row, column, lambda s=submodel, f=form, o=out: et.export(s, state, o, format=f))
    row["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def known_rows(results: Path) -> dict[str, Row]:
    """The rows of an earlier run."""
    if not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {row["name"]: row for row in rows}


def passed(rows: Sequence[Row], column: str) -> int:
    """How many models pass in `column`."""
    return sum(row.get(column) == "yes" for row in rows)


def refusal(outcome: str) -> str:
    """The sentence of a refusal, without the folders of this machine."""
    return re.sub(r"(?<!\S)/\S*/", "", outcome.partition(": ")[2])


def page(rows: Sequence[Row]) -> str:
    """The page of the documentation."""
    head = ["model", "library", "kind", "parameters", *COLUMNS[:-1]]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    refusals: list[str] = []
    for row in rows:
        cells = [row["name"], row["library"], row["kind"], f"{row.get('params', 0):,}"]
        for column in COLUMNS[:-1]:
            outcome = row.get(column, row["full"])  # a row that ended early says why there
            if outcome == "yes":
                share = row.get("shares", {}).get(column)
                cells.append("yes" if share is None else f"{share:.2f}")
            else:
                refusals.append(f"- `{row['name']}`, {column}: {refusal(outcome)}")
                cells.append("no")
        lines.append("| " + " | ".join(cells) + " |")
    counts = ", ".join(f"{column} {passed(rows, column)}" for column in COLUMNS[:-1])
    specs = ", ".join(f"`{spec}`" for spec in SPECS[1:])
    return "\n".join(
        [
            "# Models",
            "",
            f"`make test-zoo` takes {len(MODELS)} models as their libraries ship them, with random "
            "weights and small inputs. It exports the full model to ONNX and to TFLite, with "
            f"verification, and cuts the submodels {specs}. The table gives the "
            f"capacities of these submodels. {len(rows)} models have been run.",
            "",
            "`tests/zoo/zoo_models.py` in the source has the configuration of each model; "
            "[Models of other libraries](../guides/export.md#models-of-other-libraries) says what "
            "your model may need.",
            "",
            f"Models that pass: {counts}.",
            "",
            *lines,
            "",
            "## Refusals",
            "",
            *(refusals or ["None."]),
            "",
        ]
    )


def in_own_process(model: ZooModel) -> Row:
    """The results of one model; what ends its process or takes too long is one of them."""
    row: Row = {"name": model.name, "kind": model.kind, "library": model.library}
    try:
        command = [sys.executable, __file__, "--one", model.name]
        run = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return {**row, "full": f"timeout: no end after {LONGEST} seconds"}
    if run.returncode:
        return {**row, "full": f"exit {run.returncode}: {run.stderr[-300:]}"}
    finished: Row = json.loads(run.stdout.splitlines()[-1])
    return finished


def summary(row: Row) -> str:
    """One line about a model's results."""
    failed = {column: row.get(column, "no")[:160] for column in ("full", *COLUMNS)}
    failed = {column: outcome for column, outcome in failed.items() if outcome != "yes"}
    seconds = sum(row.get("seconds", {}).values())
    return f"{row['name']}: {seconds:.0f} s, {row.get('megabytes', 0)} MB {failed or ''}"


def main() -> int:
    """Run, write the table, and fail if fewer models pass than the goals say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these models; no table is written")
    parser.add_argument("--results", type=Path, default=Path(".zoo.jsonl"), help="kept results")
    parser.add_argument("--again", action="store_true", help="drop earlier results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument("--one", help="print the results of one model")
    options = parser.parse_args()
    by_name = {model.name: model for model in MODELS}
    if options.one:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory() as folder:
            number = list(by_name).index(options.one)
            print(json.dumps(examine(by_name[options.one], number, Path(folder))))
        return 0
    if options.again:
        options.results.unlink(missing_ok=True)
    known = known_rows(options.results)
    wanted = [by_name[name] for name in options.names or by_name if name not in known]
    with ThreadPoolExecutor(options.jobs) as pool, options.results.open("a") as file:
        for done in as_completed([pool.submit(in_own_process, model) for model in wanted]):
            row = done.result()
            known[row["name"]] = row
            print(json.dumps(row), file=file, flush=True)
            print(summary(row), flush=True)
    if options.names:
        return 0
    rows = [known[name] for name in by_name]
    PAGE.write_text(page(rows))
    short = {
        c: f"{passed(rows, c)} of {goal}" for c, goal in GOALS.items() if passed(rows, c) < goal
    }
    print(f"written: {PAGE}; below the goal: {short or 'none'}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
