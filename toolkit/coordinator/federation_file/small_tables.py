"""The tables [evaluation], [release] and [notify] of the federation's file."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from device_agent.formats.evaluation_counts import EvaluationRequest
from toolkit.aggregation.committee import FEWEST
from toolkit.coordinator.federation_file.value_types import Positive, Span, WebAddress
from toolkit.coordinator.notifications import EventName
from toolkit.toml_files import Table


class EvaluationTable(Table):
    """The table [evaluation]: devices judge the models (federated evaluation).

    Each device keeps the `share` of its samples apart, never trains on them, and sends counts of
    its evaluations. The share 0 switches the evaluation off. With `by_class`, devices also send the
    counts of each class if their owners agree. With a `committee`, a new model is published only if
    the majority of this many devices accepts it.
    """

    share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    by_class: bool = False
    committee: Annotated[int, Field(ge=FEWEST)] | None = None

    @model_validator(mode="after")
    def _committee_has_samples(self) -> Self:
        if self.committee is not None and not self.share:
            raise ValueError(
                "a `committee` judges new models on samples that its devices hold out from "
                "training: set `share`, too, for example to 0.2"
            )
        return self

    @property
    def request(self) -> EvaluationRequest | None:
        """The evaluation that devices are asked for; None if they do not evaluate."""
        return EvaluationRequest(share=self.share, by_class=self.by_class) if self.share else None


class ReleaseTable(Table):
    """The table [release]: automatic releases, and devices that wait for them after the last round.

    - `every`: the coordinator releases the global model whenever this many rounds have passed.
    - `when`: the coordinator releases the best model instead, and only if this model is better than
      all released models.
    - `after_rounds`: devices stay after the last round and ask for releases at this interval, in
      seconds. Without this key, the agents end after the last round.
    """

    every: Positive | None = None
    when: Literal["improved"] | None = None
    after_rounds: Span | None = None

    @property
    def interval(self) -> int | None:
        """The fewest rounds from one release to the next; None if no releases are made."""
        return 1 if self.every is None and self.when is not None else self.every


class NotifyTable(Table):
    """The table [notify]: where `serve` sends the events of the federation.

    - `url`: `serve` sends each event to this address, as one JSON object in a POST request.
    - `command`: `serve` runs this program for each event, with the object on its standard input.
    - `events`: the names of the events; by default all.
    """

    url: WebAddress | None = None
    command: tuple[str, ...] = ()
    events: tuple[EventName, ...] | None = None
