"""All attacks by name, and a check that an attack fits a model."""

from collections.abc import Iterable

from exporters.programs.program import Program
from profiles.errors import InputError
from toolkit.aggregation.update_validation import is_statistic
from toolkit.coordinator.federation_file.hostile_table import AttackName
from toolkit.simulation.attacks.attack import Attack
from toolkit.simulation.attacks.changed_updates import (
    claim,
    drift,
    many_samples,
    noise,
    reverse_scale,
    scale,
    sign_flip,
    single_tensor,
    statistics,
    zeros,
)
from toolkit.simulation.attacks.colluding_clients import inner_product, little_is_enough
from toolkit.simulation.attacks.poisoned_samples import backdoored, flipped_labels

ATTACKS: dict[AttackName, Attack] = {
    "sign-flip": Attack(sign_flip, 1.0),
    "scale": Attack(scale, 10.0),
    "reverse-scale": Attack(reverse_scale, 1.0),
    "noise": Attack(noise, 10.0),
    "samples": Attack(many_samples, 1e12),
    "label-flip": Attack(claim, 1.0, flipped_labels),
    "little-is-enough": Attack(little_is_enough, 1.5, knows="several"),
    "inner-product": Attack(inner_product, 0.5, knows="several"),
    "backdoor": Attack(scale, 5.0, backdoored),
    "copies": Attack(claim, 1.0, flipped_labels, knows="first"),
    "drift": Attack(drift, 1.0),
    "statistics": Attack(statistics, 100.0),
    "single-tensor": Attack(single_tensor, 1e4),
    "zeros": Attack(zeros, 1.0),
}


def check_attack(name: AttackName, program: Program, tensors: Iterable[str]) -> None:
    """Raise InputError if the attack cannot do anything to a model.

    Args:
        name: The attack.
        program: A submodel of the model.
        tensors: The names of the model's tensors.
    """
    labels = program.labels
    classes = labels.dtype == "int64" and labels.highest is not None and not labels.sequence
    if ATTACKS[name].poison is not None and (not classes or labels.parts):
        raise _unfit(name, "labels that are classes")
    numbers = program.sample_dtype == "float32" and not program.parts
    if name == "backdoor" and (labels.shape != () or not numbers):
        raise _unfit(name, "samples of one float32 array with one class each")
    if name == "statistics" and not any(map(is_statistic, tensors)):
        raise _unfit(name, "statistics of batch norm")


def _unfit(name: str, needed: str) -> InputError:
    return InputError(
        'The attack "{attack}" needs {needed}, which the federation does not have. Choose another '
        "attack in `hostile`.",
        code="simulation.unfit-attack",
        attack=name,
        needed=needed,
    )
