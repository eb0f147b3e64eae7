"""The reference of the federation's file against its reader: every key, default and example."""

import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic.fields import FieldInfo

from device_agent.formats.preprocessing import Images, Series
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_file.privacy_table import PrivacyTable
from toolkit.coordinator.federation_file.simulation_table import SimulationTable
from toolkit.coordinator.federation_file.small_tables import (
    EvaluationTable,
    NotifyTable,
    ReleaseTable,
)
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.toml_files import Table

DOCS = Path(__file__).resolve().parents[3] / "docs"
REFERENCE = (DOCS / "reference" / "federation-file.md").read_text()
SERIES = "[data] for CSV files"
ALTERNATIVES = {"steps", "inputs", "example", "quorum", "mode", "buffer_size", "max_staleness"}
"""Keys in place of `epochs`, `input_shape`, `input_range` and `clients_per_round`."""
TABLES: dict[str, type] = {
    "The federation": CoordinatorConfig,
    "[data] for pictures": Images,
    SERIES: Series,
    "[training]": TrainingConfig,
    "[aggregation]": AggregationPolicy,
    "[evaluation]": EvaluationTable,
    "[privacy]": PrivacyTable,
    "[release]": ReleaseTable,
    "[notify]": NotifyTable,
    "[simulation]": SimulationTable,
    "[[devices]]": DeviceKind,
}


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of a section's table by key: type, default, meaning, example."""
    section = REFERENCE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    return {cell[0].strip("`"): cell[1:] for cell in cells}


def defaults(table: type) -> dict[str, Any]:
    """The keys that the reader accepts, with their defaults; MISSING where one is needed."""
    if issubclass(table, Table):
        found: dict[str, FieldInfo] = table.model_fields
        return {k: MISSING if f.is_required() else f.default for k, f in found.items()}
    if issubclass(table, msgspec.Struct):
        structs = msgspec.structs.fields(table)
        return {
            "kind": MISSING,
            **{f.name: MISSING if f.required else f.default for f in structs},
        }
    return {field.name: field.default for field in fields(table)}


@pytest.mark.parametrize("heading", TABLES)
def test_every_key_is_there_with_its_default(heading: str) -> None:
    known = defaults(TABLES[heading])
    assert rows(heading).keys() == known.keys()
    for key, (_, written, *_) in rows(heading).items():
        default = known[key]
        if default is MISSING:
            assert written == "required"
        elif default is None:
            assert written == "none"
        elif isinstance(default, Table | TrainingConfig | AggregationPolicy):
            assert written == "all defaults"
        else:
            read = tomllib.loads(f"x = {written.strip('`')}")["x"]
            value = str(default) if isinstance(default, Path) else default
            value = list(value) if isinstance(value, tuple) else value
            assert (read, type(read)) == (value, type(value))


def example(heading: str) -> str:
    """The examples of a section as a table of TOML."""
    head = "" if heading == "The federation" else f"\n{heading.partition(' for ')[0]}\n"
    examples = {
        key: row[3].strip("`")
        for key, row in rows(heading).items()
        if len(row) > 3 and key not in ALTERNATIVES
    }
    return head + "".join(f"{key} = {value}\n" for key, value in examples.items())


def test_the_example_for_csv_files_is_read(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    text = example("The federation").replace("[3, 32, 32]", "[50, 3]")
    path.write_text(text + example(SERIES) + example("[[devices]]"))
    config = load_config(path)
    assert isinstance(config.data, Series)
    assert (config.data.columns, config.data.std) == (("ax", "ay", "az"), (1.5, 1.5, 2.0))
    # A simulation keeps its settings as JSON.
    assert config.model_dump(mode="json")["data"]["columns"] == ["ax", "ay", "az"]


def test_the_examples_together_are_a_file_that_is_read(tmp_path: Path) -> None:
    # [privacy] cannot be combined with [evaluation] and others.
    text = "".join(example(heading) for heading in TABLES if heading not in (SERIES, "[privacy]"))
    path = tmp_path / "federation.toml"
    path.write_text(text)
    config = load_config(path)
    written = tomllib.loads(text)
    assert written.keys() == CoordinatorConfig.model_fields.keys() - ALTERNATIVES - {"privacy"}
    assert (config.port, config.deadline_s) == (written["port"], written["deadline_s"])
    assert config.devices[0].memory == 120_000_000


def test_the_smallest_file_is_read(tmp_path: Path) -> None:
    block = re.search(r"smallest file that serves:\n\n((?:    .*\n|\n)+)", REFERENCE)
    assert block is not None
    (tmp_path / "f.toml").write_text(re.sub("(?m)^    ", "", block[1]))
    assert load_config(tmp_path / "f.toml").expected_devices == 1
