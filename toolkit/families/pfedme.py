"""`pfedme`: pFedMe, bi-level training with a dense local model (TDPFed without tensors).

The device minimises f(theta) + lambda/2 ||theta - w||^2 over its personal model theta. It then
updates the local model by gradient steps w - rate * lambda * (w - theta). Only w is uploaded.
"""

from torch import nn

from exporters.programs.optimizers import SGD
from exporters.recording.capture import capture
from toolkit.personal.bilevel_training import BiLevelSettings, bilevel_submodel
from toolkit.personal.tensorized_model import Tensorized
from toolkit.submodels.family import Stateless
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.spec import Spec
from toolkit.submodels.spec_form import Choice, Option, SpecForm
from toolkit.submodels.submodel import Submodel

PENALTY = 12.0
"""lambda, as in TDPFed's comparison on MNIST (sections VII-A and VII-D)."""

PERSONAL_STEPS = 5
"""s, the steps of the personal model on each batch, as in that comparison."""

LOCAL_RATE = 0.05
"""Learning rate of the local model, as in that comparison."""

FORM = SpecForm(
    family="pfedme",
    usage="pfedme",
    summary=(
        "the whole model and a personal one that stays on the device (pFedMe); "
        "penalty=, personal-steps=, local-rate=, personal-start="
    ),
    options=(
        Option("penalty"),
        Option("personal-steps", lowest=1, whole=True),
        Option("local-rate"),
        Choice("personal-start", ("kept", "aggregate")),
    ),
)


class PFedMe(Stateless):
    """See the module."""

    form = FORM

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        captured = capture(model, sample_shape)
        settings = BiLevelSettings(
            penalty=FORM.number(spec, "penalty", PENALTY),
            personal_steps=FORM.whole_number(spec, "personal-steps", PERSONAL_STEPS),
            local_steps=1,
            rate=FORM.number(spec, "local-rate", LOCAL_RATE),
            optimizer=SGD(),
            restart=FORM.choice(spec, "personal-start") == "aggregate",
        )
        return bilevel_submodel(
            spec,
            captured,
            Tensorized(captured, {}),
            settings,
            training,
            lambda _: {},
            local_name="local_step",
        )


FAMILY = PFedMe()
