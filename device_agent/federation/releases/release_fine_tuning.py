"""Fine-tunes a release on the samples of a device, until another release is offered."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.device_state import DeviceState
from device_agent.federation.polling import ROUND_CHECK_S
from device_agent.federation.run_options import RunOptions
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.protocol.rounds import Progress
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.inference.fine_tuning import FineTuned, fine_tune
from device_agent.system.interval_timer import IntervalTimer
from profiles.errors import ClientError


class ReleaseFineTuning:
    """The fine-tuning of releases.

    Args:
        folder: The device's state.
        client: Fetches offers and work.
        options: Data and training options.
        train: A function that is called like `train_bundle`.
        tell: Tells the coordinator the progress.
        fetch: Fetches an offered file.
        wait_if_paused: Called before each batch.
    """

    def __init__(
        self,
        folder: DeviceState,
        client: CoordinatorClient,
        options: RunOptions,
        train: Callable[..., object],
        tell: Callable[[Progress], None],
        fetch: Callable[[FileOffer, Path], None],
        wait_if_paused: Callable[[], None],
    ) -> None:
        self._folder, self._client, self._options, self._train = folder, client, options, train
        self._tell, self._fetch, self._wait_if_paused = tell, fetch, wait_if_paused

    def __call__(self, offer: ReleaseOffer, released: Path) -> FineTuned:
        """Fine-tune the bundle `released`.

        Raises ClientError if the coordinator offers another release meanwhile.
        """
        self._tell(Progress(state="downloading"))
        self._folder.collect(offer.training, self._fetch)
        self._tell(Progress(state="training", note=f"fine-tunes release {offer.number}"))
        return fine_tune(
            self._train,
            self._options.data,
            self._options.training,
            self._folder.bundle,
            released,
            self._folder.releases.scratch,
            offer.evaluation,
            partial(self._on_batch, offer, IntervalTimer(ROUND_CHECK_S)),
        )

    def _on_batch(self, offer: ReleaseOffer, check: IntervalTimer) -> None:
        """If another release is offered, end the fine-tuning, which may have many steps."""
        self._wait_if_paused()
        if not check.due():
            return
        work = self._client.peek()  # while a round is open, the coordinator offers no release
        if work is not None and work.release is not None and work.release.number != offer.number:
            raise ClientError(
                "The coordinator does not offer release {number} any more.",
                code="release.over",
                number=offer.number,
            )
