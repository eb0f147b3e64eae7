"""Selects the training objective from the text of a loss and the outputs of a model."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from device_agent.formats.manifest import Part
from exporters.objectives.built_in import built_in
from exporters.objectives.heads import of_one_output, sum_of_heads
from exporters.objectives.loss_text import Own, parse
from exporters.objectives.own_loss import own_objective
from exporters.objectives.own_loss_check import check_own_loss, used_outputs
from exporters.programs.output_parts import PREFERRED, described_parts
from exporters.programs.training.losses import Objective
from exporters.recording.captured import Captured
from exporters.recording.model_output import OutputForm
from exporters.recording.recording_comparison import random_outputs
from profiles.errors import ModelError


def objective(loss: str, outputs: OutputForm | tuple[int, ...]) -> Objective:
    """Select the objective for a loss and a model's outputs.

    Args:
        loss: The text of a loss, see `loss_text.py`.
        outputs: The model's outputs, or the shape of a single output without the batch axis. If the
            class axis has size 1, cross-entropy is binary.

    Returns:
        The objective.

    Raises:
        ModelError: The loss does not fit the outputs, or the user's own loss cannot be used.
        InputError: There is no such loss.

    Examples:
        >>> objective("cross-entropy", (21, 64, 64)).labels.shape
        (64, 64)
    """
    form = outputs
    if not isinstance(form, OutputForm):
        form = OutputForm((Part(name="", shape=form),))
    parsed, parts = parse(loss), form.parts
    if isinstance(parsed, Own):
        return own_objective(str(parsed), form)
    if isinstance(parsed, tuple):
        if len(parsed) > 1:
            return sum_of_heads(parsed, parts)
        return of_one_output(parsed[0].output, parsed[0].loss, parts)
    if len(parts) == 1:
        return built_in(parsed, parts[0].shape)
    if any(part.name == PREFERRED for part in parts):
        return of_one_output(PREFERRED, parsed, parts)
    raise several_outputs(loss, parts)


def objective_of(loss: str, captured: Captured) -> Objective:
    """Select the objective for a recorded model. The user's own loss is tried on the outputs.

    Raises errors like `objective`.
    """
    goal = objective(loss, captured.outputs)
    if goal.own:
        output = random_outputs(captured, torch.Generator().manual_seed(0))
        try:
            check_own_loss(goal, loss, captured.outputs, output)
        except ModelError as error:
            if error.code != "loss.recording-differs":
                raise
            goal = own_objective(loss, captured.outputs, with_gradients=True)
            check_own_loss(goal, loss, captured.outputs, output)
        goal = replace(goal, used=used_outputs(goal, loss, captured.outputs, output))
    return goal


def several_outputs(loss: str, parts: Sequence[Part]) -> ModelError:
    """The error for several outputs if the loss does not name the output that it trains."""
    names = [part.name for part in parts]
    return ModelError(
        "The model returns several outputs: {outputs}. The loss {loss!r} does not say which output "
        "it trains. Name one output, as in --loss {one!r}, or give each output a loss, as in "
        "--loss {all!r}. Or give a loss of your own: --loss module:function.",
        code="model.several-outputs",
        outputs=described_parts(parts),
        loss=loss,
        one=f"{names[0]}={loss}",
        all=" + ".join(f"{name}={loss}" for name in names[:2]),
    )
