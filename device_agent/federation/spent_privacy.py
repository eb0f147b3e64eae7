"""The privacy that the samples of a device have spent: privacy.json in the state folder.

Later bundles must protect the samples at least as well as the file says.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import SamplePrivacy, Struct, encode
from profiles.errors import InputError, TrustError
from profiles.json_decoding import MalformedError, decode_json
from profiles.text_formatting import counted

if TYPE_CHECKING:
    from device_agent.privacy.sample_accountant import SampleSteps

log = logging.getLogger(__name__)


class SpentPrivacy(Struct, frozen=True, kw_only=True):
    """The content of privacy.json.

    `delta` is the delta of the last round. `steps` has one entry for each pair of sampling
    probability and noise multiplier. An entry also has the number of training steps with this pair.
    """

    delta: float
    steps: Annotated[tuple[tuple[float, float, int], ...], Meta(min_length=1)]


def read_spent(path: Path) -> SpentPrivacy | None:
    """Read privacy.json. Returns None if this device has not trained with privacy.

    Raises InputError if the file is damaged.
    """
    try:
        return decode_json(path.read_bytes(), SpentPrivacy)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, MalformedError) as error:
        raise InputError(
            "{path} cannot be read: {reason}. It records the privacy budget that the samples of "
            "this device have spent. Restore the file. Or, if earlier rounds need not count, "
            "delete it.",
            code="state.unreadable-privacy",
            path=str(path),
            reason=str(error),
        ) from None


def add_spent(path: Path, more: "SampleSteps", delta: float) -> None:
    """Add the steps of a training to privacy.json, and log the sum.

    Raises InputError for the same reason as `read_spent`.
    """
    earlier = read_spent(path)
    totals = {(q, z): steps for q, z, steps in earlier.steps} if earlier is not None else {}
    key = (more.probability, more.noise_multiplier)
    totals[key] = totals.get(key, 0) + more.steps
    steps = tuple((*pair, count) for pair, count in totals.items())
    write_file(path, encode(SpentPrivacy(delta=delta, steps=steps)))
    log.info("The samples of this device have spent %s.", spent_text(path))


def check_still_private(path: Path, terms: SamplePrivacy | None) -> None:
    """Raise TrustError if a bundle with `terms` protects samples less than earlier bundles did.

    Otherwise a coordinator could end the protection without telling anybody.

    Raises InputError like `read_spent`.
    """
    earlier = read_spent(path)
    if earlier is None:
        return
    if terms is None:
        raise TrustError(
            "The federation trained with differential privacy for samples, but its new bundle "
            "trains without it. Nothing was trained. Ask the operator. To agree, leave and "
            "join again.",
            code="trust.no-sample-privacy",
        )
    noise = min(noise for _, noise, _ in earlier.steps)
    if terms.noise_multiplier < noise or terms.delta > earlier.delta:
        raise TrustError(
            "The federation trained with the noise {noise:g} and delta {delta:g} for samples, "
            "and its new bundle has the noise {new_noise:g} and delta {new_delta:g}. Nothing "
            "was trained. Ask the operator. To agree, leave and join again.",
            code="trust.less-sample-privacy",
            noise=noise,
            delta=earlier.delta,
            new_noise=terms.noise_multiplier,
            new_delta=terms.delta,
        )


def spent_text(path: Path) -> str | None:
    """Describe the content of privacy.json. Returns None if there is no such file."""
    spent = read_spent(path)
    if spent is None:
        return None
    # Imported here: most calls of `status` do not need NumPy.
    from device_agent.privacy.sample_accountant import SampleSteps, epsilon_of

    parts = [SampleSteps(*part) for part in spent.steps]
    epsilon, steps = epsilon_of(parts, spent.delta), sum(part.steps for part in parts)
    return f"epsilon {epsilon:.3g} at delta {spent.delta:g} after {counted(steps, 'step')}"
