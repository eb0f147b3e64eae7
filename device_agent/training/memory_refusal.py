"""Predicts whether the training of a bundle fits into the memory limits of this process."""

from collections.abc import Sequence

from device_agent.formats.manifest import Manifest
from device_agent.system.process_memory import available_bytes
from device_agent.training.memory_estimate import session_bytes, training_bytes
from device_agent.training.memory_limits import Ceiling
from profiles.cost_model.memory_rule import START_VARIATION_BYTES, TRAINING_RESERVE_BYTES
from profiles.errors import DoesNotFitError
from profiles.text_formatting import bytes_as_option


def needed_bytes(manifest: Manifest, validating: bool) -> tuple[int, str] | None:
    """Predict the memory that a training needs in addition to the idle agent.

    Args:
        manifest: Manifest of the bundle to train.
        validating: Whether the training evaluates held-out samples after each epoch.

    Returns:
        The peak in bytes and the signatures that run at the peak; None if the manifest has no
        prediction for a signature.
    """
    peak = training_bytes(manifest, validating)
    return peak and (peak[0] + TRAINING_RESERVE_BYTES, peak[1])


def check_fits(manifest: Manifest, validating: bool, limits: Sequence[Ceiling]) -> None:
    """Check that a training is predicted to stay within all limits.

    Args:
        manifest: Manifest of the bundle to train.
        validating: Whether the training evaluates held-out samples after each epoch.
        limits: The limits as `ceilings` finds them.

    Raises:
        DoesNotFitError: A limit is below the predicted peak. If there is no prediction, a limit is
            below the memory of the runtime's first session.
    """
    if limits:
        check_need(needed_bytes(manifest, validating), manifest, limits)


def check_need(need: tuple[int, str] | None, manifest: Manifest, limits: Sequence[Ceiling]) -> None:
    """Check that a predicted need of memory stays within all limits.

    Args:
        need: Bytes in addition to the idle agent, and the signatures that run at the peak. None if
            unknown.
        manifest: Manifest of the bundle.
        limits: The limits that `ceilings` has found, at least one.

    Raises:
        DoesNotFitError: See `check_fits`.
    """
    # onnxruntime may abort the process if memory runs out while it opens its first session. So the
    # memory for this session must be free, even without a prediction.
    peak, running = need or (session_bytes(manifest), "any graph")
    tightest = min(limits, key=lambda ceiling: ceiling.left)
    if peak <= tightest.left:
        return
    used, allowed = bytes_as_option(tightest.used), bytes_as_option(tightest.limit)
    if tightest.left <= 0:
        why = f"the idle agent alone uses {used}, but {tightest.name} allows only {allowed}"
    else:
        why = (
            f"running {running} needs {bytes_as_option(peak)} in addition to the {used} of the "
            f"idle agent, but {tightest.name} allows only {allowed}"
        )
    needed = peak + tightest.used + START_VARIATION_BYTES
    # A smaller submodel may use the memory that remains after the training's own part.
    fitting = tightest.left - TRAINING_RESERVE_BYTES
    # Every submodel needs the memory of the runtime's first session. If less is free, suggest no
    # submodel.
    possible = fitting > session_bytes(manifest)
    most = bytes_as_option(fitting, round_down=True)
    smaller = f", or take a submodel with a peak memory of at most {most}" if possible else ""
    raise DoesNotFitError(
        "{submodel} does not fit: {reason}. Allow at least {needed}{smaller}.",
        code="memory.does-not-fit",
        submodel=manifest.submodel,
        limit=tightest.name,
        limit_bytes=tightest.limit,
        idle_bytes=tightest.used,
        needed_bytes=needed,
        fitting_peak_bytes=fitting // 10**5 * 10**5 if possible else None,
        reason=why,
        needed=bytes_as_option(needed),
        smaller=smaller,
    )


def fits(manifest: Manifest, validating: bool, limits: Sequence[Ceiling]) -> bool:
    """Whether `check_fits` raises no error."""
    try:
        check_fits(manifest, validating, limits)
    except DoesNotFitError:
        return False
    return True


def spare_bytes(manifest: Manifest, validating: bool, limits: Sequence[Ceiling]) -> int:
    """Predict the memory that a training leaves free.

    Args:
        manifest: Manifest of the bundle to train.
        validating: Whether the training evaluates held-out samples after each epoch.
        limits: The limits as `ceilings` finds them.

    Returns:
        Free memory in bytes; 0 if the need of the training is unknown.
    """
    need = needed_bytes(manifest, validating)
    if need is None:
        return 0
    # Without a limit, half of the available memory is left to the other programs of the device.
    left = min((ceiling.left for ceiling in limits), default=(available_bytes() or 0) // 2)
    return max(0, left - need[0])
