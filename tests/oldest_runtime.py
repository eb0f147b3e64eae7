"""Whether exported graphs run on the oldest onnxruntime that is supported: `make test-oldest`.

`write FOLDER` exports graphs of every operator group and of whole models, and what the newest
onnxruntime computes of random inputs; `check FOLDER`, in the environment of the oldest, compares.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

TOLERANCE = 1e-4
"""Relative error of an output between the two; kernels add up in different orders."""


def outcome(graph: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    read = {port.name: feeds[port.name] for port in session.get_inputs()}
    return dict(zip(names, session.run(None, read), strict=True))


def write(folder: Path) -> None:
    import edgetailor
    from exporters.onnx.onnx_writer import to_onnx
    from exporters.programs.program import ProgramSignature
    from layer_cases import Case, combined_signature
    from operator_rows import ROWS
    from toolkit import models
    from toolkit.submodels.global_model import from_model

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng()

    def keep(name: str, signature: ProgramSignature, feeds: dict[str, np.ndarray]) -> None:
        graph = folder / f"{name}.onnx"
        graph.write_bytes(to_onnx(signature))
        np.savez(folder / f"{name}.feeds.npz", **feeds)
        np.savez(folder / f"{name}.results.npz", **outcome(graph, feeds))
        print(f"wrote {name}")

    for group, rows in ROWS.items():
        cases = {f"r{n}": Case.of(row, record=True) for n, row in enumerate(rows.values())}
        feeds = {n: case.feeds(int(draw.integers(2**31))) for n, case in cases.items()}
        flat = {f"{n}/{k}": t.numpy() for n, own in feeds.items() for k, t in own.items()}
        keep(group.replace(" ", "_"), combined_signature(cases), flat)

    for name, shape, limit in (("resnet20", (3, 32, 32), 0), ("imdb_bilstm", (16,), 10_000)):
        model = getattr(models, name)()
        submodel = edgetailor.split(model, "full", shape)
        values = submodel.cut(from_model(model))
        for signature in submodel.program.signatures:
            fed = {}
            for port in signature.inputs:
                size = [5 if n is None else n for n in port.shape]
                if port.state in values:
                    fed[port.name] = values[port.state].detach().numpy()
                elif port.dtype == "int64":
                    fed[port.name] = draw.integers(2 if port.kind == "labels" else limit, size=size)
                else:
                    fed[port.name] = np.asarray(draw.random(size), np.float32)
            keep(f"{name}_{signature.name}", signature, fed)


def check(folder: Path) -> int:
    print(f"onnxruntime {onnxruntime.__version__}")
    missed = 0
    graphs = sorted(folder.glob("*.onnx"))
    for graph in graphs:
        feeds = dict(np.load(graph.with_suffix(".feeds.npz")))
        expected = np.load(graph.with_suffix(".results.npz"))
        for name, came in outcome(graph, feeds).items():
            wanted = expected[name]
            error = float(np.linalg.norm(came - wanted)) / max(float(np.linalg.norm(wanted)), 1e-4)
            if not error <= TOLERANCE:
                missed += 1
                print(f"{graph.stem}: {name} is off by {error:.1e}")
    print(f"{len(graphs)} graphs, {missed} outputs differ")
    return int(missed > 0 or not graphs)


if __name__ == "__main__":
    task, place = sys.argv[1:]
    sys.exit(write(Path(place)) if task == "write" else check(Path(place)))
