"""The JSON Schema of the profile document: `python -m profiles.documents.profile_schema` prints it.

`profile.schema.json` in this folder is its output, for readers without Python.
"""

import sys

import msgspec

from profiles.documents.bundle_profile import PROFILE_VERSION, Profile

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def profile_schema() -> bytes:
    """The schema. It is generated from the structs, so it always agrees with them."""
    schema = msgspec.json.schema(Profile)
    profile = schema["$defs"]["Profile"]
    profile["properties"]["version"] = {"const": PROFILE_VERSION}
    profile["required"].insert(0, "version")
    document = {"$schema": DIALECT, "title": f"EdgeTailor profile {PROFILE_VERSION}", **schema}
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


if __name__ == "__main__":
    sys.stdout.buffer.write(profile_schema())
