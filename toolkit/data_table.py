"""The table [data] of a TOML file: how pictures or CSV files of a device become samples."""

from pathlib import Path

import msgspec

from device_agent.formats.preprocessing import Images, Preprocessing, Series
from profiles.errors import InputError
from profiles.text_formatting import did_you_mean
from toolkit.toml_files import read_toml

KINDS = {"images": Images, "series": Series}


def preprocessing_of(given: object) -> Preprocessing:
    """Convert the content of a table [data]. Raises ValueError with the reason if it is wrong."""
    if not isinstance(given, dict) or given.get("kind") not in KINDS:
        raise ValueError('it needs a `kind`: "images" or "series"')
    known = ["kind", *KINDS[given["kind"]].__struct_fields__]
    for key in given:
        if key not in known:
            raise ValueError(
                f"unknown key `{key}`{did_you_mean(key, known)} The keys for "
                f"{given['kind']} are {', '.join(known)}"
            )
    try:
        return msgspec.convert(given, Images | Series)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        what = what[0].lower() + what[1:]
        raise ValueError(f"`{path.rstrip('`')}`: {what}" if path else what) from None


def read_data_table(path: Path) -> Preprocessing:
    """Read the table [data] of a TOML file, such as a federation's. Other tables are ignored.

    Raises:
        InputError: The file cannot be read or has no such table, or the table is wrong.
    """
    content = read_toml(path)
    if "data" not in content:
        raise InputError(
            "{path} has no table [data], which says how files become samples.",
            code="config.missing-key",
            path=str(path),
            key="data",
        )
    try:
        return preprocessing_of(content["data"])
    except ValueError as error:
        raise InputError(
            "{path}: `data`: {reason}.",
            code="config.bad-value",
            path=str(path),
            key="data",
            reason=str(error),
        ) from None
