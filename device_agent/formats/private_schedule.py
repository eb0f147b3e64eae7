"""Checks that a bundle with differential privacy for samples uses samples only with privacy."""

from device_agent.formats.manifest import LOSS, Manifest, Train

OF_ONE_SAMPLE = ("samples", "labels", "scalar", "seed", "state")
"""The inputs on which the gradient of a sample may depend. `classes` depends on all samples."""


def keeps_privacy(manifest: Manifest) -> bool:
    """Whether the gradients of all samples are clipped and noised before they change the update.

    Also true for a manifest that does not promise privacy and does not use its steps and ports.
    """
    trains = [i for i in manifest.schedule if isinstance(i, Train)]
    ports = [p for s in manifest.signatures.values() for p in (*s.inputs, *s.outputs)]
    concerned = any(i.privacy is not None for i in trains)
    concerned |= any(step.each_sample is True for i in trains for step in i.steps)
    concerned |= any(port.kind == "gradient" for port in ports)
    return not concerned or (len(manifest.schedule) == 1 and _is_private(manifest))


def _is_private(manifest: Manifest) -> bool:
    """Whether the only instruction trains with differential privacy for samples."""
    (instruction,) = manifest.schedule
    if not isinstance(instruction, Train) or instruction.privacy is None:
        return False
    first, *others = instruction.steps
    sample = manifest.signatures[first.signature]
    made = {port.name: port for port in sample.outputs if port.kind == "gradient"}
    later = [port for step in others for port in manifest.signatures[step.signature].inputs]
    return (
        (first.each_sample, first.times) == (True, 1)
        and bool(others)
        and not any(step.each_sample is True for step in others)
        and any(port.name == LOSS for port in sample.outputs)
        and all(
            p.kind == "gradient" or (p.name, p.kind) == (LOSS, "metric") for p in sample.outputs
        )
        and all(port.dtype == "float32" and None not in port.shape for port in made.values())
        and all(port.kind in OF_ONE_SAMPLE for port in sample.inputs)
        and all(port.kind in ("scalar", "gradient", "state") for port in later)
        and all(made.get(port.name) == port for port in later if port.kind == "gradient")
        and not any(entry.by_class or entry.role == "personal" for entry in manifest.tensors)
    )
