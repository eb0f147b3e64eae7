"""Exports one submodel as a bundle: the public `edgetailor.export`."""

from pathlib import Path

from exporters.export import ExportedBundle, Format
from exporters.export import export as export_program
from profiles.progress import Report, silent
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.submodel import Submodel


def export(
    submodel: Submodel,
    state: GlobalModel,
    out: str | Path,
    *,
    format: Format = "onnx",
    verify: bool | None = None,
    force: bool = False,
    progress: Report = silent,
) -> ExportedBundle:
    """Write `submodel` with its part of the global weights as a bundle that a device trains.

    If you send bundles to devices as files, call it in every round, once for each submodel. A
    coordinator (`edgetailor serve`) exports by itself. From the second round on, the graphs come
    from the cache, and only the weights are new.

    Args:
        submodel: The result of `split`.
        state: The global model's weights.
        out: The folder to write. It must not exist, unless `force` is set.
        format: `onnx` for ONNX Runtime, `tflite` for LiteRT.
        verify: Whether to compare operators and training steps with PyTorch in float64 first. By
            default, cached graphs that passed the comparison in an earlier export are not compared
            again.
        force: Replace an earlier bundle at `out`.
        progress: Called with the name of each stage when it begins; `print` shows them.

    Returns:
        The folder of the bundle, and the result of the verification.

    Raises:
        ExportError: If this format does not support an operator of the model.
        VerificationError: If graph and PyTorch differ by more than the tolerance.
        InputError: If `out` exists or cannot be written.

    Examples:
        >>> import tempfile
        >>> import edgetailor as et
        >>> model = et.load_model("toolkit.models:digits_cnn")
        >>> submodel = et.split(model, "slice:units.2", sample_shape=(1, 8, 8))
        >>> folder = tempfile.mkdtemp()
        >>> state = et.GlobalModel(model.state_dict())
        >>> bundle = et.export(submodel, state, f"{folder}/bundle", verify=False)
        >>> sorted(path.name for path in bundle.out.glob("train*"))
        ['train.nchwc16.onnx', 'train.nchwc8.onnx', 'train.onnx', 'train.winograd.onnx']
    """
    if any(entry.factor is not None for entry in submodel.program.tensors):
        progress("factorizing the weights")
    return export_program(
        submodel.program,
        submodel.cut(state),
        out,
        base=state.fingerprint(),
        format=format,
        check=verify,
        force=force,
        report=progress,
    )
