"""The coordinator's file, and what keeps a coordinator from starting on it."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from device_agent.formats.input_range import Interval
from profiles.errors import InputError
from refusals import refused
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.server import Server
from toolkit.coordinator.settings_check import check_same_settings
from toolkit.coordinator.storage.coordinator_store import Store
from vector_fleet import CONFIG, Fleet, VectorModel, configured, running


def test_a_port_in_use(fleet: Fleet, tmp_path: Path) -> None:
    port = int(fleet[0].url.rpartition(":")[2])
    config = configured(tmp_path, CONFIG.replace("port = 0", f"port = {port}"))
    with refused("service.port-in-use", "fleet.toml", port=port):
        Server(config, VectorModel(), Path("fleet.toml"))


def test_a_host_of_somebody_else(tmp_path: Path) -> None:
    config = configured(tmp_path, f'host = "192.0.2.1"\n{CONFIG}')
    with refused("service.unknown-host", host="192.0.2.1"):
        Server(config, VectorModel(), Path("fleet.toml"))


def test_a_state_folder_in_use_or_of_another_fleet(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with running(config), refused("state.in-use", path=str(config.state)):
        Server(config, VectorModel(), Path("fleet.toml"))
    other = configured(tmp_path, CONFIG.replace("epochs = 1", "masked = true"))
    with refused("state.other-federation", key="training.masked") as error:
        Server(other, VectorModel(), Path("fleet.toml"))
    assert str(error.value) == (
        f"{config.state} contains a federation with another `training.masked`, and this key cannot "
        "change: set it back to false, or set another `state` folder."
    )
    for text, key, value in (
        (CONFIG.replace('"board"', '"new"'), "devices", '["desktop", "board"]'),
        (CONFIG.replace('"full"', '"auto"'), "devices.desktop.submodel", '"full"'),
        (CONFIG.replace("rounds = 3", "rounds = 3\nseed = 7"), "seed", "0"),
    ):
        with refused("state.other-federation", key=key) as error:
            Server(configured(tmp_path, text), VectorModel(), Path("fleet.toml"))
        assert value in str(error.value).split("set it back to ")[1]


class NothingScheduled:
    """Part of a store to which no operator has applied a change."""

    settings = SimpleNamespace(scheduled=list)


def test_a_federation_older_than_a_setting_has_its_default(tmp_path: Path) -> None:
    config = configured(tmp_path)

    class OldStore(NothingScheduled):
        def set_once(self, key: str, value: str) -> str:
            before = json.loads(value)
            del before["training"]["steps"], before["training"]["milestones"], before["inputs"]
            return json.dumps(before)

    check_same_settings(config, cast("Store", OldStore()))
    newer = configured(tmp_path, CONFIG.replace("epochs = 1", "steps = 2\nmilestones = [3, 5]"))
    assert newer.training.milestones == (3, 5)
    changes = check_same_settings(newer, cast("Store", OldStore()))
    assert [change.text() for change in changes] == [
        "training.milestones: [] -> [3, 5]",
        "training.steps: null -> 2",
    ]


def test_the_inputs_of_a_sample_keep_their_order(tmp_path: Path) -> None:
    """Both orders have the same size, but the columns of samples mean something else."""
    line = "input_shape = [2]"
    assert line in CONFIG
    one, other = 'inputs = ["a:1", "b:1"]', 'inputs = ["b:1", "a:1"]'
    config = configured(tmp_path, CONFIG.replace(line, one))
    store = Store(config.state, 1)
    check_same_settings(config, store)
    for text, key, value in (
        (other, "inputs", '["a:1", "b:1"]'),
        (line, "inputs", '["a:1", "b:1"]'),
    ):
        changed = configured(tmp_path, CONFIG.replace(line, text))
        with refused("state.other-federation", f"set it back to {value}, or", key=key):
            check_same_settings(changed, store)
    store.close()


def test_budgets_of_kinds_may_change(tmp_path: Path) -> None:
    """A kind whose memory nothing fits would wait for ever otherwise."""
    kept: dict[str, str] = {}

    class Kept(NothingScheduled):
        def set_once(self, key: str, value: str) -> str:
            return kept.setdefault(key, value)

    check_same_settings(configured(tmp_path), cast("Store", Kept()))
    # Earlier versions kept the budgets as well.
    old = json.loads(kept["federation"])
    old["devices"][0]["memory"] = 48_000_000
    kept["federation"] = json.dumps(old)
    larger = configured(tmp_path, CONFIG.replace("count = 2", 'count = 2\nmemory = "90MB"'))
    assert larger.devices[0].memory == 90_000_000
    check_same_settings(larger, cast("Store", Kept()))


def test_the_budget_of_privacy_may_not_change(tmp_path: Path) -> None:
    kept: dict[str, str] = {}

    class Kept(NothingScheduled):
        def set_once(self, key: str, value: str) -> str:
            return kept.setdefault(key, value)

    text = CONFIG + "\n[privacy]\nclip = 1.0\ndelta = 1e-5\nepsilon = {}\n"
    check_same_settings(configured(tmp_path, text.format(3)), cast("Store", Kept()))
    for other in (text.format(30), CONFIG):
        with refused("state.other-federation"):
            check_same_settings(configured(tmp_path, other), cast("Store", Kept()))


def test_keys_of_simulations_may_change(tmp_path: Path) -> None:
    class OldStore(NothingScheduled):
        def set_once(self, key: str, value: str) -> str:
            return json.dumps(before)

    plain = configured(tmp_path)
    before = {
        "model": plain.model,
        "input_shape": list(plain.input_shape),
        "seed": plain.seed,
        "training": asdict(plain.training),
        "data": None,
        "devices": [
            kind.model_dump(exclude={"fallback"}, exclude_none=True) for kind in plain.devices
        ],
    }
    more = '\nprofile = "pi4.json"\nslowdown = 2.0\nupload_mbps = 1'
    text = re.sub(r"(submodel = .*)", rf"\1{more}", CONFIG)
    assert text != CONFIG
    check_same_settings(configured(tmp_path, text), cast("Store", OldStore()))


@pytest.mark.parametrize(
    ("before", "after", "code", "key", "words"),
    [
        (
            "rounds = 3",
            "rounds = 3\nround = 4",
            "config.unknown-key",
            "round",
            "unknown key `round`: did you mean 'rounds'? The keys here are title",
        ),
        *(
            ("rounds = 3", f"rounds = 3\nkeep = {value}", "config.bad-value", "keep", '"all" or')
            for value in ("0", "true", "3.0", "'3'", "'ALL'")
        ),
        *(
            ("rounds = 3", f'rounds = 3\n{key} = "a\\u0000b"', "config.bad-value", key, "null byte")
            for key in ("weights", "statistics", "state", "tls_cert", "tls_key")
        ),
        (
            "rounds = 3",
            "rounds = 3\ninput_range = [4, 0]",
            "config.bad-value",
            "",
            "below the second",
        ),
        (
            "rounds = 3",
            "rounds = 3\ninput_range = [0, 4]\nexample = 'x.npy'",
            "config.bad-value",
            "",
            "remove one of them",
        ),
        ("rounds = 3", "", "config.missing-key", "rounds", "keys here are title"),
        ("rounds = 3", "round = 3", "config.unknown-key", "round", "are title"),
        ("submodel", "submodels", "config.unknown-key", "devices[0].submodels", "name, submodel,"),
        ("rounds = 3", "rounds = 'x'", "config.bad-value", "rounds", '1 or "endless"'),
        ("rounds = 3", "rounds = 'ten'", "config.bad-value", "rounds", '1 or "endless"'),
        ("rounds = 3", "rounds = '3'", "config.bad-value", "rounds", '1 or "endless"'),
        ("rounds = 3", "rounds = true", "config.bad-value", "rounds", '1 or "endless"'),
        ("rounds = 3", "rounds = 3.0", "config.bad-value", "rounds", '1 or "endless"'),
        ("[2]", "['2']", "config.wrong-type", "input_shape[0]", "'2'; it must be an integer"),
        ("count = 2", "count = '2'", "config.bad-value", "devices[0].count", "'2': it must be a w"),
        (
            "epochs = 1",
            "learning_rate = '0.1'",
            "config.wrong-type",
            "training.learning_rate",
            "'0.1'; it must be a number",
        ),
        (
            "epochs = 1",
            "masked = 'yes'",
            "config.wrong-type",
            "training.masked",
            "'yes'; it must be true or false",
        ),
        ("rounds = 3", "rounds = 1.5", "config.bad-value", "rounds", '1 or "endless"'),
        (
            "rounds = 3",
            "rounds = 0",
            "config.bad-value",
            "rounds",
            '1 or "endless"',
        ),
        ("epochs = 1", "epoch = 1", "config.unknown-key", "training.epoch", "keys here are batch"),
        ("epochs = 1", "epochs = 0", None, None, "[training] epochs must be at least 1; it is 0"),
        (
            "[training]",
            "[aggregation]\nweight = 'uniform'\n[training]",
            "config.unknown-key",
            "aggregation.weight",
            "keys here are weights, temperature",
        ),
        (
            "[training]",
            "[aggregation]\nweights = 'equal'\n[training]",
            "config.bad-value",
            "aggregation.weights",
            "'equal': Input should be 'samples', 'uniform' or 'softmax'.",
        ),
        (
            "epochs = 1",
            "loss = 'cross_entropy'",
            "option.invalid-value",
            None,
            "there is no loss 'cross_entropy': did you mean 'cross-entropy'?",
        ),
        (
            "[training]",
            "[aggregation]\nbeta = 0\n[training]",
            "aggregate.bad-beta",
            None,
            "[aggregation] beta must be",
        ),
        ('"full"', '"full:"', "config.bad-value", "devices[0].submodel", "'full:': "),
        (
            '"board"',
            '"Board"',
            "config.bad-value",
            "devices[1].name",
            "'Board': String",
        ),
        ('"board"', '"desktop"', "config.bad-value", "", "same name: desktop"),
        ("count = 2", "counts = 2", "config.unknown-key", "devices[0].counts", "keys here are na"),
        ("port = 0", "port = 70000", "config.bad-value", "port", "less than or equal to 65535"),
        (
            "[training]",
            "forget_after = '1h'\n[release]\nafter_rounds = '1h'\n[training]",
            "config.bad-value",
            "",
            "`forget_after` must be longer than `after_rounds`",
        ),
        ("rounds = 3", "rounds =", "config.not-toml", None, "line "),
        ("rounds = 3", "rounds = " + "[" * 5000, "config.not-toml", None, "nested too deeply"),
    ],
)
def test_mistakes_in_the_file(
    tmp_path: Path, before: str, after: str, code: str | None, key: str | None, words: str
) -> None:
    assert before in CONFIG
    with pytest.raises(InputError) as error:
        configured(tmp_path, CONFIG.replace(before, after, 1))
    assert code in (None, error.value.code)
    assert key in (None, error.value.values.get("key"))
    assert error.value.values["path"] == str(tmp_path / "fleet.toml")
    assert str(error.value).startswith(f"{tmp_path / 'fleet.toml'}")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_aggregation_table(tmp_path: Path) -> None:
    assert configured(tmp_path).aggregation == AggregationPolicy()
    table = '[aggregation]\nweights = "softmax"\ntemperature = inf\nfactors = "act"\nbeta = 1.8\n'
    config = configured(tmp_path, CONFIG.replace("[training]", f"{table}[training]"))
    assert config.aggregation == AggregationPolicy("softmax", math.inf, "act", 1.8)


def test_a_whole_number_for_a_fraction_and_a_size_in_text(tmp_path: Path) -> None:
    table = 'submodel = "auto"\nmemory = "2 kB"\nstep_time = 1'
    config = configured(tmp_path, CONFIG.replace('submodel = "full"', table))
    assert (config.devices[0].memory, config.devices[0].step_time) == (2000, 1)


@pytest.mark.parametrize(("written", "whole"), [("[0, 4]", True), ("[0.0, 4.0]", False)])
def test_the_range_of_samples(tmp_path: Path, written: str, whole: bool) -> None:
    config = configured(tmp_path, f"input_range = {written}\n{CONFIG}")
    assert config.known_inputs().range == (Interval(low=0, high=4, whole=whole),)
    np.save(tmp_path / "rows.npy", np.array([[0.0, 0.0], [4.0, 4.0]]))
    config = configured(tmp_path, f'example = "rows.npy"\n{CONFIG}')
    assert config.known_inputs().range == (Interval(low=0, high=4, whole=True),)


def test_paths_start_from_the_file(tmp_path: Path) -> None:
    config = configured(tmp_path, f'weights = "start.safetensors"\n{CONFIG}')
    assert config.weights == tmp_path / "start.safetensors"
    assert config.state == tmp_path / "state"
    with refused("config.not-readable", path=str(tmp_path / "nothing.toml")):
        load_config(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('kind = "pictures"', '`data`: it needs a `kind`: "images" or "series".'),
        ('classes = ["a", "b"]', "it needs a `kind`"),
        ('kind = "images"', "missing required field `classes`"),
        ('kind = "images"\nclasses = ["a"]', "`classes`: expected `array` of length >= 2."),
        ('kind = "images"\nclasses = ["a", 2]', "`classes[1]`: expected `str`, got `int`."),
        (
            'kind = "images"\nclasses = ["a", "b"]\nmeen = [0]',
            "unknown key `meen`: did you mean 'mean'? The keys for images are kind, classes, fit,",
        ),
        (
            'kind = "images"\nclasses = ["a", "b"]',
            "[data] does not fit: pictures give samples (1, h, w) or (3, h, w), but the model",
        ),
        (
            'kind = "series"\ncolumns = ["a", "b", "c"]\nlabel = "y"',
            "its columns give samples (3,) or (lines, 3), but the model takes (2,).",
        ),
        (
            'kind = "series"\ncolumns = ["a", "b"]\nlabel = "y"\nclasses = ["a/b", "c"]',
            "'a/b' cannot be the name of a folder or of a label.",
        ),
        (
            'kind = "series"\ncolumns = ["a", "b"]\nlabel = "y"\nstd = [1, 0]',
            "`std[1]`: expected `float` > 0.0.",
        ),
        (
            'kind = "series"\ncolumns = ["a", "b"]\nlabel = "y"\nmean = [nan, 0]',
            "`mean[0]`: expected",
        ),
    ],
)
def test_mistakes_in_the_table_of_data(tmp_path: Path, table: str, words: str) -> None:
    text = CONFIG.replace("[training]", f"[data]\n{table}\n[training]")
    with refused("config.bad-value") as error:
        configured(tmp_path, text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_fltrust_needs_held_out_samples(tmp_path: Path) -> None:
    text = f'aggregation.rule = "fltrust"\n{CONFIG}'
    assert configured(tmp_path, text).aggregation.rule == "fltrust"
    without = "".join(line for line in text.splitlines(True) if "held_out" not in line)
    with refused("config.bad-value", "set `held_out`, or use another rule"):
        configured(tmp_path, without)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("budget_s = 600", "lower `budget_s`"),
        (
            'mode = "async"\nbuffer_size = 2\naggregation.rule = "median"',
            "all updates of one model",
        ),
        ('site = true\naggregation.rule = "krum"', "it cannot be used with site = true"),
        ("budget_s = 0", "budget_s"),
        ("clients_per_round = 0", "a whole number from 1, or a share"),
        ("clients_per_round = 1.5", "up to 1.0"),
        ("clients_per_round = true", "a share of the members like 0.1"),
        ("clients_per_round = 4", "only 3 devices can join"),
        ("clients_per_round = 2\nquorum = 2", "remove `quorum`"),
        ("clients_per_round = 1\nmin_updates = 2", "lower `min_updates`"),
        ('clients_per_round = 2\nmode = "async"\nbuffer_size = 2', "needs mode"),
        ("clients_per_round = 2\nover_selection = 0.9", "over_selection"),
        ('clients_per_round = 2\nselection = "fastest"', '"module:callable"'),
        ('selection = "oldest"', "needs `clients_per_round`"),
        ("over_selection = 1.5", "needs `clients_per_round`"),
    ],
)
def test_selections_and_budgets_that_are_refused(tmp_path: Path, keys: str, words: str) -> None:
    with refused("config.bad-value", words):
        configured(tmp_path, f"{keys}\n{CONFIG}")


@pytest.mark.parametrize(
    ("keys", "members", "wanted", "asked"),
    [
        ("clients_per_round = 2", 3, 2, 3),
        ("clients_per_round = 0.1", 250, 25, 33),
        ("clients_per_round = 1.0\nover_selection = 1", 250, 250, 250),
        ("clients_per_round = 0.1", 3, 1, 2),
        ("clients_per_round = 0.1\nmin_updates = 2", 3, 2, 3),
        ("clients_per_round = 0.5\nover_selection = 1.1", 200, 100, 110),  # not 111
    ],
)
def test_how_many_devices_a_round_asks(
    tmp_path: Path, keys: str, members: int, wanted: int, asked: int
) -> None:
    config = configured(tmp_path, f"{keys}\n{CONFIG}")
    assert config.updates_wanted(members) == wanted
    assert config.devices_asked(wanted) == asked


def test_counts_of_devices_do_not_go_with_private_samples(tmp_path: Path) -> None:
    private = "[training]\nsample_clip = 1.0\nsample_noise = 2.0\nsample_delta = 0.001\n"
    text = CONFIG.replace("[training]\n", private)
    config = configured(tmp_path, text).training
    assert (config.sample_clip, config.sample_noise, config.sample_delta) == (1.0, 2.0, 0.001)
    with refused("config.bad-value") as caught:
        configured(tmp_path, text.replace("[training]", "[evaluation]\nshare = 0.2\n[training]"))
    assert "`share` of [evaluation] cannot be combined with `sample_clip`" in str(caught.value)
    with refused("option.conflict"):
        configured(tmp_path, text.replace("sample_noise = 2.0\n", ""))
