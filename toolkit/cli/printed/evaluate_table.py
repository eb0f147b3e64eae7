"""What `edgetailor evaluate` prints."""

from profiles.text_formatting import counted
from toolkit.model_evaluation import Evaluation


def show_evaluation(found: Evaluation) -> None:
    """Print the accuracy and the loss of a model."""
    samples = counted(found.samples, "sample")
    if found.counted != found.samples:
        samples = f"{counted(found.counted, 'label')} of {samples}"
    accuracy = "" if found.accuracy is None else f"accuracy {found.accuracy:.1%}, "
    print(f"{accuracy}loss {found.loss:.4f} on {samples}")
