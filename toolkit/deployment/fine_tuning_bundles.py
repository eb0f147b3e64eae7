"""The training bundles with which devices fine-tune a release."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from exporters.programs.program import inference_program
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.storage.release_folder import TRAINING
from toolkit.coordinator.storage.saved_rounds import model_file

logger = logging.getLogger(__name__)


def write_training_bundles(
    config: CoordinatorConfig, round_: int, kinds: Iterable[str], steps: int, folder: Path
) -> None:
    """Write a training bundle of the model of `round_` for each kind that can be fine-tuned.

    A bundle trains `steps` batches. Three types of kinds are left out: kinds with planned
    submodels, kinds with personal models, and kinds whose output only the loss can interpret.
    """
    # The fine-tuned model stays on its device, so the samples need no noise.
    training = replace(config.training, steps=steps, sample_clip=None, sample_noise=None)
    model = federation(config.model_copy(update={"training": training}))
    model.load(model_file(config.state, round_).read_bytes())
    for name in kinds:
        kind = config.kind(name)
        if kind.planned:
            logger.warning("%s is not fine-tuned: each device has a submodel of its own.", name)
            continue
        program = model.submodel(kind.submodel).program
        if any(entry.role == "personal" for entry in program.tensors):
            logger.warning("%s is not fine-tuned: its devices have personal models.", name)
            continue
        if inference_program(program).output == "outputs":
            logger.warning(
                "%s is not fine-tuned: devices cannot compare its models, because only its loss "
                "knows what the outputs mean.",
                name,
            )
            continue
        logger.info("%s: bundle for fine-tuning", name)
        out = folder / f"{name}{TRAINING}"
        out.mkdir()
        for file, data in model.bundle(kind.submodel, round_ + 1).items():
            (out / file).write_bytes(data)
