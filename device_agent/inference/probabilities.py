"""The meaning of a model's output: probabilities of named classes, or a regression."""

import math

import numpy as np
from msgspec import UNSET

from device_agent.formats.label_rule import class_axis, label_rule, output_of
from device_agent.formats.manifest import PREDICT, Manifest, Output
from device_agent.formats.packing import output_parts


def output_meaning(manifest: Manifest) -> Output:
    """The rule that turns the output of a bundle's `predict` into probabilities.

    Several outputs that are packed into one array have no common rule.
    """
    if manifest.output is not UNSET:
        return manifest.output
    return "outputs" if output_parts(manifest, PREDICT) else output_of(label_rule(manifest))


def class_names(manifest: Manifest) -> tuple[str, ...]:
    """The names of the classes, in the order of the probabilities; empty for a regression.

    The names come from the bundle's `preprocessing`. Without it, they are "0", "1" and so on.
    """
    meaning = output_meaning(manifest)
    if meaning in ("numbers", "outputs"):
        return ()
    named = () if manifest.preprocessing is None else manifest.preprocessing.classes
    if meaning == "independent":
        answers = math.prod(size or 1 for size in manifest.signatures[PREDICT].outputs[0].shape)
        return named if len(named) == answers else tuple(map(str, range(answers)))
    return named or tuple(map(str, range(max(manifest.classes, 2))))


def probabilities(output: np.ndarray, meaning: Output) -> np.ndarray:
    """Turn a model's output into probabilities, whose sum along the class axis is 1.

    Args:
        output: The output (n, classes), with more axes if there are positions; see `class_axis`.
        meaning: The kind of the output. Outputs of the kinds `numbers` and `outputs` are returned
            unchanged.

    Returns:
        Float32 probabilities in the shape of the output. An output with one number for two classes
        becomes two probabilities, of class 0 and of class 1. Each independent answer becomes the
        probability of yes.

    Examples:
        >>> probabilities(np.array([[0.0], [np.log(3)]], np.float32), "sigmoid").round(2)
        array([[0.5 , 0.5 ],
               [0.25, 0.75]], dtype=float32)
    """
    if meaning in ("numbers", "outputs"):
        return output
    if meaning == "independent":
        return np.asarray(1 / (1 + np.exp(-output.astype(np.float64))), np.float32)
    if output.ndim == 1:  # a single logit without an axis for its class
        output = output[:, None]
    axis = class_axis(output.ndim)
    logits = output.astype(np.float64)
    if meaning == "sigmoid":  # the softmax of 0 and the logit
        logits = np.concatenate((np.zeros_like(logits), logits), axis)
    powers = np.exp(logits - logits.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True), np.float32)


def decode_sequence(probabilities: np.ndarray) -> list[int]:
    """Decode the probabilities (t, classes) of a CTC model to its most probable path.

    Repeated classes are merged first. Then class 0, the blank, is removed.

    Examples:
        >>> decode_sequence(np.eye(3)[[0, 2, 2, 0, 2, 1]])
        [2, 2, 1]
    """
    path = probabilities.argmax(1)
    changes = np.flatnonzero(np.diff(path, prepend=-1))
    return [int(path[index]) for index in changes if path[index] != 0]
