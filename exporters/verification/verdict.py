"""The result of verification."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The value with the largest error among all signatures.

    Attributes:
        error: The relative error of this value.
        signature: The signature that computes it.
        output: The output port. For an operator inside the graph, it is the nearest parameter.
        seed: The seed of the random inputs.
        tolerance: The largest error that passes.
        step: The training step that computed the value, from 1.
        steps: The number of consecutive steps that ran.
        operator: The operator that computed the value, if it is known.
        place: The place in the model's source that calls the operator, as ` (module 'head', ...)`,
            or empty.
        form: The form of the graph that computed the value. None for the plain graph.
    """

    error: float
    signature: str
    output: str
    seed: int
    tolerance: float
    step: int = 1
    steps: int = 1
    operator: str | None = None
    place: str = ""
    form: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the worst value is within the tolerance."""
        return self.error <= self.tolerance

    @property
    def result(self) -> str:
        """The result in at most 80 columns."""
        return (
            f"{'verified' if self.passed else 'verification failed'}: relative error "
            f"{self.error:.1e} (tolerance {self.tolerance:.0e}, seed {self.seed})"
        )

    @property
    def worst(self) -> str:
        """The location of the error: the operator, or the output and step."""
        form = f" (form {self.form})" if self.form else ""
        if self.operator is not None:
            near = f" near {self.output!r}" if self.output else ""
            return f"worst operator: {self.operator}{near} in {self.signature!r}{form}{self.place}"
        place = f"worst tensor: {self.output!r} of {self.signature!r}{form}"
        return place if self.steps == 1 else f"{place}, step {self.step} of {self.steps}"

    def __str__(self) -> str:
        """Result and place of the error as one sentence."""
        return f"{self.result}, {self.worst}"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict with the largest error relative to its tolerance. Wrong operators come first."""
    return max(
        verdicts, key=lambda v: (not v.passed and v.operator is not None, v.error / v.tolerance)
    )
