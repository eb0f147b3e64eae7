"""`pfedme`: pFedMe, bi-level training with a dense local model (TDPFed without tensors).

The device minimises f(theta) + lambda/2 ||theta - w||^2 over its personal model theta and then
takes gradient steps w - rate * lambda * (w - theta). Only w is uploaded.
"""

from torch import nn

from exporters.programs.capture import capture
from exporters.programs.optimizers import SGD
from toolkit.personal.bilevel_training import BiLevel, bi_level
from toolkit.personal.tensorized_model import Tensorized
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import Stateless, Submodel
from toolkit.submodels.training_config import TrainingConfig

PENALTY = 15.0
"""lambda, as in TDPFed's comparison."""

PERSONAL_STEPS = 5
"""Steps towards the personal optimum on each batch, TDPFed's s on MNIST."""

LOCAL_RATE = 0.05
"""Rate of the local model, TDPFed's for pFedMe on MNIST."""


class PFedMe(Stateless):
    """See the module."""

    name = "pfedme"
    usage = "pfedme"
    summary = (
        "the whole model and a personal one that stays on the device (pFedMe); "
        "penalty=, personal-steps=, local-rate="
    )

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        spec.check_no_inner()
        spec.check_no_size()
        spec.check_options("penalty", "personal-steps", "local-rate")
        captured = capture(model, sample_shape)
        settings = BiLevel(
            penalty=spec.option("penalty", PENALTY),
            personal_steps=spec.whole("personal-steps", PERSONAL_STEPS, 1),
            local_steps=1,
            rate=spec.option("local-rate", LOCAL_RATE),
            optimizer=SGD(),
        )
        return bi_level(
            spec,
            captured,
            Tensorized(captured, {}),
            settings,
            training,
            lambda _: {},
            local_name="local_step",
        )


FAMILY = PFedMe()
