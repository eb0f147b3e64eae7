"""`pfedme`: pFedMe, bi-level training with a dense local model (TDPFed without CP factors).

The device minimises f(theta) + lambda/2 ||theta - w||^2 over its personal model theta. It then
updates the local model by gradient steps w - rate * lambda * (w - theta). Only w is uploaded.
"""

from exporters.programs.training.optimizers import SGD
from toolkit.families import forms
from toolkit.personal.bilevel_training import BiLevelSettings, bilevel_submodel
from toolkit.personal.tensorized_model import Tensorized
from toolkit.submodels.family import Family
from toolkit.submodels.submodel import SplitRequest, Submodel

PENALTY = 12.0
"""lambda, as in TDPFed's comparison on MNIST (sections VII-A and VII-D)."""

PERSONAL_STEPS = 5
"""s, the steps of the personal model on each batch, as in that comparison."""

LOCAL_RATE = 0.05
"""Learning rate of the local model, as in that comparison."""


class PFedMe(Family):
    """The family `pfedme`; see the module."""

    form = forms.PFEDME
    trains_personal_model = True

    def split(self, request: SplitRequest) -> Submodel:
        """See Family."""
        captured, spec = request.capture(), request.spec
        settings = BiLevelSettings(
            penalty=forms.PFEDME.number(spec, "penalty", PENALTY),
            personal_steps=forms.PFEDME.whole_number(spec, "personal-steps", PERSONAL_STEPS),
            local_steps=1,
            rate=forms.PFEDME.number(spec, "local-rate", LOCAL_RATE),
            optimizer=SGD(),
            restart=forms.PFEDME.choice(spec, "personal-start") == "aggregate",
        )
        return bilevel_submodel(
            request,
            captured,
            Tensorized(captured, {}),
            settings,
            lambda _: {},
            local_name="local_step",
        )


FAMILY = PFedMe()
