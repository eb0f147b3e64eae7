"""The description of a partial aggregate: the content of `partial.json`."""

from device_agent.formats.manifest import AtLeastOne, Count, FileEntry, Struct, TensorEntry
from profiles.errors import UpdateError
from profiles.json_decoding import MalformedError, decode_json, refuse_repeated_keys

PARTIAL_VERSION = 1
RECORD = "partial.json"
TENSORS = "partial.safetensors"


class PartWeight(Struct, frozen=True, kw_only=True):
    """The weight of the updates that contain the elements in `part`. None means all elements."""

    part: tuple[tuple[tuple[Count, Count], ...], ...] | None
    weight: float


class SumEntry(Struct, frozen=True, kw_only=True):
    """The weighted sum of the global tensor `name`, over the updates that contain its elements."""

    name: str
    weights: tuple[PartWeight, ...]


class FactorsEntry(Struct, frozen=True, kw_only=True):
    """The weighted sums of the factors of one submodel.

    Attributes:
        submodel: Family and size. The server keeps the factors under this key.
        tensors: The tensors that the updates contain.
        weight: The weight of all updates.
        all_classes: The weight of the updates that contain the rows of all classes.
        classes: For each class, ascending, the weight of the updates that contain this class's row,
            but not the rows of all classes.
    """

    submodel: str
    tensors: tuple[TensorEntry, ...]
    weight: float
    all_classes: float
    classes: tuple[tuple[Count, float], ...] = ()


class PartialRecord(Struct, frozen=True, kw_only=True):
    """The content of `partial.json`.

    Attributes:
        version: Format version.
        base: Fingerprint of the global model that the updates were trained from.
        policy: Fingerprint of the aggregation policy.
        updates: How many updates are in the sums.
        trained: The global tensors that at least one update lists as parameters, sorted.
        sums: The sums of global tensors.
        factors: The sums of factors.
        batches: How far each counter of batches advances, by name.
        file: Size and SHA-256 of `partial.safetensors`.
    """

    version: int = PARTIAL_VERSION
    base: str
    policy: str
    updates: AtLeastOne
    trained: tuple[str, ...]
    sums: tuple[SumEntry, ...]
    factors: tuple[FactorsEntry, ...]
    batches: tuple[tuple[str, Count], ...] = ()
    file: FileEntry


def decode_partial_record(data: bytes, origin: str) -> PartialRecord:
    """The record in the bytes of a `partial.json`; `origin` names it in errors.

    Raises UpdateError if it is malformed or of another version.
    """
    try:
        record = decode_json(data, PartialRecord)
        refuse_repeated_keys(data)
    except MalformedError as error:
        raise UpdateError(
            "{origin} is not the record of a partial aggregate: {reason}. Send it again.",
            code="partial.malformed-record",
            origin=origin,
            reason=str(error),
        ) from None
    if record.version != PARTIAL_VERSION:
        raise UpdateError(
            "{origin} has version {found}; this program reads {supported}. Install the same "
            "version of edgetailor on both sides.",
            code="partial.wrong-version",
            found=record.version,
            supported=PARTIAL_VERSION,
            origin=origin,
        )
    return record
