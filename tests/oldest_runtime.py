"""Whether exported graphs run on the oldest onnxruntime that is supported: `make test-oldest`.

`write FOLDER` exports graphs of every operator group and of whole models, and what the newest
onnxruntime computes of random inputs; `check FOLDER`, in the environment of the oldest, compares.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import numpy as np
import onnxruntime

TOLERANCE = 1e-4
"""Relative error of an output between the two; kernels add up in different orders."""

INTEGERS, ROUNDED = "int8", 1e-2
"""Graphs that compute with integers, and their tolerance: a sum near a half may round up or down,
which is a step of 1/255 of the largest activation."""


def session_of(graph: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def outcome(graph: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = session_of(graph)
    names = [output.name for output in session.get_outputs()]
    read = {port.name: feeds[port.name] for port in session.get_inputs()}
    return dict(zip(names, session.run(None, read), strict=True))


def outcome_in_place(graph: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs that may be written over their old values, computed so."""
    session = session_of(graph)
    noted = json.loads(session.get_modelmeta().custom_metadata_map.get("in_place", "[]"))
    binding = session.io_binding()
    own = {port.name: np.array(feeds[port.name]) for port in session.get_inputs()}
    for name, array in own.items():
        binding.bind_cpu_input(name, array)
    results = {name: own[name.removesuffix("+")] for name in noted}
    for port in session.get_outputs():
        if port.name in results:
            array = results[port.name]
            binding.bind_output(
                port.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
            )
        else:
            binding.bind_output(port.name)
    session.run_with_iobinding(binding)
    return results


def write(folder: Path) -> None:
    from torch.nn import functional

    import edgetailor
    from device_agent.formats.graph_forms import BLOCKS, blocked_form
    from device_agent.runtime.blocked_probe import FOLDER, block_size
    from exporters.onnx.forms.blocked_layout import blocked
    from exporters.onnx.forms.winograd import winograd
    from exporters.onnx.onnx_writer import to_onnx
    from exporters.programs.program import ProgramSignature
    from layer_cases import Case, combined_signature
    from operator_rows import ROWS
    from toolkit import models
    from toolkit.submodels.global_model import from_model

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng()

    def keep(name: str, signature: ProgramSignature, feeds: Mapping[str, np.ndarray]) -> None:
        data = to_onnx(signature)
        keep_graph(name, data, feeds)
        form = blocked(data, block_size() or 0, 32) if block_size() else None
        if form is not None:
            keep_graph(f"{name}_blocked", form, feeds)
        form = winograd(data)
        if form is not None:
            keep_graph(f"{name}_winograd", form, feeds)

    def keep_graph(name: str, data: bytes, feeds: Mapping[str, np.ndarray]) -> None:
        graph = folder / f"{name}.onnx"
        graph.write_bytes(data)
        np.savez(folder / f"{name}.feeds.npz", allow_pickle=False, **feeds)
        np.savez(folder / f"{name}.results.npz", allow_pickle=False, **outcome(graph, feeds))
        print(f"wrote {name}")

    for group, rows in ROWS.items():
        cases = {f"r{n}": Case.of(row, record=True) for n, row in enumerate(rows.values())}
        feeds = {n: case.feeds(int(draw.integers(2**31))) for n, case in cases.items()}
        flat = {f"{n}/{k}": t.numpy() for n, own in feeds.items() for k, t in own.items()}
        keep(
            group.replace(" ", "_"),
            combined_signature({n: c.signature for n, c in cases.items()}),
            flat,
        )

    for name, shape, limit in (("resnet20", (3, 32, 32), 0), ("imdb_bilstm", (16,), 10_000)):
        model = getattr(models, name)()
        submodel = edgetailor.split(model, "full", shape)
        # A ReLU whose input is zero but for rounding may have another gradient in another version.
        with patch.object(functional, "relu", functional.gelu):
            smooth = edgetailor.split(model, "full", shape)
        values = submodel.cut(from_model(model))
        signatures = zip(submodel.program.signatures, smooth.program.signatures, strict=True)
        for signature in (
            other if signature.trains else signature for signature, other in signatures
        ):
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

    model, x = edgetailor.load_model("toolkit.models:digits_cnn"), draw.random((64, 1, 8, 8))
    data = x.astype(np.float32), np.arange(64) % 10
    precisions: tuple[Literal["float16", "int8"], ...] = ("float16", "int8")
    for precision in precisions:
        out = folder / f"deployed {precision}"
        edgetailor.deploy(model, "full", (1, 8, 8), out, data=data, precision=precision, force=True)
        keep_graph(f"deployed_{precision}", (out / "predict.onnx").read_bytes(), {"x": data[0]})

    probes = folder / "probes"
    probes.mkdir(exist_ok=True)
    for block in BLOCKS:
        (probes / f"{block}.onnx").write_bytes(
            (FOLDER / f"{blocked_form(block)}.onnx").read_bytes()
        )
    (probes / "right.json").write_text(json.dumps(block_size()))


def right_block(probes: Path) -> int | None:
    """The block of this runtime, found as the agent finds it (blocked_probe.py)."""
    draw = np.random.default_rng(0)
    for probe in sorted(probes.glob("*.onnx")):
        session = session_of(probe)
        given = {p.name: draw.normal(size=p.shape).astype("f") for p in session.get_inputs()}
        plain, blocked = session.run(["plain", "blocked"], given)
        if np.abs(plain - blocked).max() <= TOLERANCE * np.abs(plain).max():
            return int(probe.stem)
    return None


def check(folder: Path) -> int:
    print(f"onnxruntime {onnxruntime.__version__}")
    missed = written = 0
    graphs = sorted(folder.glob("*.onnx"))
    for graph in graphs:
        feeds = dict(np.load(graph.with_suffix(".feeds.npz")))
        expected = np.load(graph.with_suffix(".results.npz"))
        apart = outcome(graph, feeds)
        for name, came in outcome_in_place(graph, feeds).items():
            written += 1
            if not np.array_equal(came, apart[name]):
                missed += 1
                print(f"{graph.stem}: {name} differs when it is written over its old value")
        for name, came in apart.items():
            wanted = expected[name]
            error = float(np.linalg.norm(came - wanted)) / max(float(np.linalg.norm(wanted)), 1e-4)
            if not error <= (ROUNDED if INTEGERS in graph.stem else TOLERANCE):
                missed += 1
                print(f"{graph.stem}: {name} is off by {error:.1e}")
    print(f"{len(graphs)} graphs, {written} outputs in place, {missed} outputs differ")
    probes = folder / "probes"
    block, expected_block = right_block(probes), json.loads((probes / "right.json").read_text())
    print(f"blocks of {block} channels; the newest has {expected_block}")
    return int(missed > 0 or not written or block != expected_block)


if __name__ == "__main__":
    task, folder = sys.argv[1:]
    if task == "write":
        write(Path(folder))
    else:
        sys.exit(check(Path(folder)))
