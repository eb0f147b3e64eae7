"""A device remembers that its federation promised secure sums, and refuses work without them.

secure-sums     exists if the federation has promised or used secure sums: then updates are never
                sent. It has the last round with a masked update, and how many were sent in it
noise-of-sums   the noise multiplier that secure sums had first; later ones have no less
"""

import math
from pathlib import Path

from device_agent.formats.atomic_files import write_file
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.secure_sums import SecureTerms
from profiles.errors import InputError, TrustError


class SecurePromise:
    """The promise of secure sums in the state folder `state` of a device."""

    def __init__(self, state: Path) -> None:
        self._secure, self._noise = state / "secure-sums", state / "noise-of-sums"

    @property
    def exists(self) -> bool:
        """Whether the federation has promised or used secure sums."""
        return self._secure.exists()

    def remember(self, terms: SecureTerms) -> None:
        """Remember that the federation uses secure sums with the noise of `terms`.

        This device never sends an update, and takes part in no sum with less noise.
        """
        # Write the noise first: a kill between the two writes must not leave sums without noise.
        if terms.privacy is not None and self._promised_noise is None:
            write_file(self._noise, f"{terms.privacy.noise_multiplier}\n".encode())
        if not self.exists:
            write_file(self._secure, b"")

    @property
    def _promised_noise(self) -> float | None:
        """The least noise multiplier of secure sums; None if they may be without noise.

        Raises InputError if the file is damaged.
        """
        try:
            noise = float(self._noise.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            noise = math.nan
        if not math.isfinite(noise):
            raise InputError(
                "{path} is damaged. It records how much noise secure sums promised to this device. "
                "Restore the file. Or delete it, if you accept less noise.",
                code="state.unreadable-noise",
                path=str(self._noise),
            )
        return noise

    def masked_updates(self, round_: int) -> int:
        """How many updates this device has sent behind masks in `round_`."""
        try:
            last, count = map(int, self._secure.read_text().split())
        except (FileNotFoundError, ValueError):  # none yet, or a damaged file
            return 0
        return count if last == round_ else 0

    def count_masked_update(self, round_: int) -> None:
        """Count an update that is now sent behind masks in `round_`."""
        write_file(self._secure, f"{round_} {self.masked_updates(round_) + 1}\n".encode())

    def check_kept(self, work: Work) -> None:
        """Raise TrustError if secure sums were promised, and `work` asks for single figures.

        Otherwise a coordinator could end the protection without telling anybody. If `work` has a
        secure sum, this is a promise, even if the device knows no key of the coordinator. If the
        device knows a key, call `DeviceState.check_work` first.
        """
        if work.state == "judge" and self.exists:
            raise TrustError(
                "The coordinator asks how good the model is on the samples of this device, but the "
                "federation uses secure sums, which reveal no figure of a single device. Nothing "
                "was sent. Ask the operator. To agree, leave and join again.",
                code="trust.single-figures",
                round=work.round,
            )
        if work.state != "train":
            return
        if work.secure is not None:
            self._check_noise(work.secure)
            self.remember(work.secure)
        elif self.exists:
            raise TrustError(
                "The coordinator asks for the update of this device, but the federation used "
                "secure sums before, which reveal no single update. Nothing was sent. Ask the "
                "operator. To agree, leave and join again.",
                code="trust.no-secure-sum",
                round=work.round,
            )

    def _check_noise(self, terms: SecureTerms) -> None:
        """Raise TrustError if a sum has less noise than was promised."""
        promised = self._promised_noise
        noise = 0.0 if terms.privacy is None else terms.privacy.noise_multiplier
        if promised is not None and noise < promised:
            raise TrustError(
                "At first, secure sums had the noise multiplier {promised:g}. The coordinator now "
                "asks for a sum with {noise:g}. Nothing was sent. Ask the operator. To agree, "
                "leave and join again.",
                code="trust.less-noise",
                promised=promised,
                noise=noise,
            )

    def forget(self) -> None:
        """Remove the promise. May be called repeatedly."""
        self._secure.unlink(missing_ok=True)
        self._noise.unlink(missing_ok=True)
