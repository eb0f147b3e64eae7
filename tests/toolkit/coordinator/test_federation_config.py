"""The coordinator's file, and what keeps a coordinator from starting on it."""

import math
from pathlib import Path

import pytest

from profiles.errors import InputError
from refusals import refused
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.coordinator.federation_config import load_config
from toolkit.coordinator.server import Server
from vector_fleet import CONFIG, Fleet, VectorModel, configured, running


def test_a_port_in_use(fleet: Fleet, tmp_path: Path) -> None:
    port = int(fleet[0].url.rpartition(":")[2])
    config = configured(tmp_path, CONFIG.replace("port = 0", f"port = {port}"))
    with refused("service.port-in-use", port=port) as error:
        Server(config, VectorModel(), Path("fleet.toml"))
    assert "fleet.toml" in str(error.value)


def test_a_host_of_somebody_else(tmp_path: Path) -> None:
    config = configured(tmp_path, f'host = "192.0.2.1"\n{CONFIG}')
    with refused("service.unknown-host", host="192.0.2.1"):
        Server(config, VectorModel(), Path("fleet.toml"))


def test_a_state_folder_in_use_or_of_another_fleet(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with running(config), refused("state.in-use", path=str(config.state)):
        Server(config, VectorModel(), Path("fleet.toml"))
    other = configured(tmp_path, CONFIG.replace("epochs = 1", "epochs = 2"))
    with refused("state.other-federation", key="training"):
        Server(other, VectorModel(), Path("fleet.toml"))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("rounds = 3", "rounds = 3\nround = 4", "there is no key `round`; the keys here are model"),
        ("rounds = 3", "", "the key `rounds` is missing"),
        ("rounds = 3", "round = 3", "there is no key `round`; the keys here are model"),
        ("submodel", "submodels", r"there is no key `devices\[0\]\.submodels`; the keys here are"),
        ("rounds = 3", "rounds = 'x'", "`rounds` is 'x'; it must be a whole number"),
        ("rounds = 3", "rounds = 1.5", "`rounds` is 1.5; it must be a whole number"),
        ("rounds = 3", "rounds = 0", "`rounds` is 0: Input should be greater than or equal to 1"),
        ("epochs = 1", "epoch = 1", r"there is no key `training\.epoch`; the keys here are batch"),
        ("epochs = 1", "epochs = 0", r"\[training\] epochs must be at least 1; it is 0"),
        (
            "[training]",
            "[aggregation]\nweight = 'uniform'\n[training]",
            r"there is no key `aggregation\.weight`; the keys here are weights, temperature",
        ),
        (
            "[training]",
            "[aggregation]\nweights = 'equal'\n[training]",
            r"`aggregation\.weights` is 'equal': Input should be 'samples', 'uniform' or 'softmax'",
        ),
        ("[training]", "[aggregation]\nbeta = 0\n[training]", r"\[aggregation\] beta must be"),
        ('"full"', '"full:"', r"`devices\[0\]\.submodel` is 'full:': .* is no submodel spec"),
        ('"board"', '"Board"', r"`devices\[1\]\.name` is 'Board': String should match"),
        ('"board"', '"desktop"', "devices are named twice: desktop"),
        (
            "count = 2",
            "counts = 2",
            r"there is no key `devices\[0\]\.counts`; the keys here are na",
        ),
        ("port = 0", "port = 70000", "`port` is 70000: .* less than or equal to 65535"),
        ("rounds = 3", "rounds =", "is no TOML file"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in CONFIG
    with pytest.raises(InputError, match=message) as error:
        configured(tmp_path, CONFIG.replace(before, after, 1))
    assert str(error.value).startswith(f"{tmp_path / 'fleet.toml'}")
    assert "\n" not in str(error.value)


def test_the_aggregation_table(tmp_path: Path) -> None:
    assert configured(tmp_path).aggregation == AggregationPolicy()
    table = '[aggregation]\nweights = "softmax"\ntemperature = inf\nfactors = "act"\nbeta = 1.8\n'
    config = configured(tmp_path, CONFIG.replace("[training]", f"{table}[training]"))
    assert config.aggregation == AggregationPolicy("softmax", math.inf, "act", 1.8)


def test_paths_start_from_the_file(tmp_path: Path) -> None:
    config = configured(tmp_path, f'weights = "start.safetensors"\n{CONFIG}')
    assert config.weights == tmp_path / "start.safetensors"
    assert config.state == tmp_path / "state"
    with pytest.raises(InputError, match="No such file"):
        load_config(tmp_path / "nothing.toml")
