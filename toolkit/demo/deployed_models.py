"""The end of the demo: the trained model is deployed, and every device predicts with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from device_agent.formats.evaluation_counts import LocalEvaluation
from device_agent.formats.update import RECORD, decode_record
from toolkit.demo import demo_settings
from toolkit.demo.child_processes import Child, Processes
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_processes import AGENT, SERVER
from toolkit.demo.demo_settings import Member

DEPLOY_S = 300.0
"""How long the deployment may take, in seconds."""
PREDICT_S = 120.0
"""How long the predictions of all devices may take, in seconds."""


@dataclass(frozen=True)
class DeployedModel:
    """A model as a file for devices.

    Attributes:
        kind: The kind of devices that get the model.
        submodel: The submodel in the file.
        precision: `float32` or `int8`.
        bytes: Size of the graph, with the weights inside.
        accuracy: Share of the held-out digits that the file predicts correctly, from 0 to 1.
    """

    kind: str
    submodel: str
    precision: str
    bytes: int
    accuracy: float


@dataclass(frozen=True)
class Use:
    """The use of the trained model after the last round.

    Attributes:
        models: The deployed models.
        correct: How many of `demo_settings.PREDICTED` new digits each device predicts correctly.
    """

    models: tuple[DeployedModel, ...]
    correct: Mapping[str, int]


def start_deploying(
    folder: DemoFolder, processes: Processes, members: Sequence[Member], rounds: int
) -> list[Child]:
    """Deploy the model of the last round for every kind, and for the first kind also as int8."""
    last = ["--round", rounds, "--json"]
    int8 = ["--precision", "int8", "--kind", members[0].kind.name]
    commands = {
        "deploy": ["deploy", folder.config, "--out", folder.deployed, *last],
        "deploy-int8": ["deploy", folder.config, "--out", folder.int8, *last, *int8],
    }
    outputs = {"deploy": folder.cards, "deploy-int8": folder.int8_card}
    return [
        processes.start(name, SERVER, arguments, stdout=outputs[name])
        for name, arguments in commands.items()
    ]


def predict_everywhere(
    folder: DemoFolder, processes: Processes, members: Sequence[Member], deploying: Sequence[Child]
) -> Use:
    """Wait for the deployment, let every device predict new digits, and read all results."""
    processes.finish(deploying, DEPLOY_S)
    with np.load(folder.held_out) as data:
        np.save(folder.new_digits, data["x"][: demo_settings.PREDICTED])
        labels = [str(label) for label in data["y"][: demo_settings.PREDICTED]]
    predicting = []
    for member in members:
        bundle, out = folder.deployed / member.kind.name, folder.predictions / f"{member.name}.json"
        arguments = ["predict", bundle, "--data", folder.new_digits, "--threads", 1, "--json"]
        predicting.append(processes.start(f"predict-{member.name}", AGENT, arguments, stdout=out))
    processes.finish(predicting, PREDICT_S)
    correct = {}
    for member in members:
        document = json.loads((folder.predictions / f"{member.name}.json").read_text())
        classes = [prediction["class"] for prediction in document["predictions"]]
        correct[member.name] = sum(map(str.__eq__, classes, labels))
    cards = [
        bundle["card"]
        for file in (folder.cards, folder.int8_card)
        for bundle in json.loads(file.read_text())["bundles"]
    ]
    models = tuple(
        DeployedModel(
            kind=card["kind"],
            submodel=card["submodel"],
            precision=card["precision"],
            bytes=card["graph_bytes"],
            accuracy=card["quality"]["accuracy"],
        )
        for card in cards
    )
    return Use(models, correct)


def last_evaluation(folder: DemoFolder, device: str) -> LocalEvaluation | None:
    """How `device` judged the received model and its own model in its last round, or None."""
    path = folder.state_of(device) / "update" / RECORD
    evaluation = decode_record(path.read_bytes(), str(path)).evaluation
    return evaluation if isinstance(evaluation, LocalEvaluation) else None
