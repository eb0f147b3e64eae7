"""Going back to the model of an earlier round."""

from pathlib import Path

from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.published_files import publish
from toolkit.coordinator.storage.saved_rounds import model_file


def roll_back(folder: Path, target: int) -> int:
    """Let the next round of the federation in `folder` start from the model of round `target`.

    Returns:
        The number of that next round.

    Raises:
        InputError: If `serve` runs on the folder, or if the model of `target` is not there.
    """
    model = model_file(folder, target)
    # The current model may be damaged: going back is a way out then.
    store = Store(folder, needs_model=False)
    try:
        number = store.rollback(target)
        publish(folder, model.read_bytes(), store.history(), store.models())
    finally:
        store.close()
    return number
