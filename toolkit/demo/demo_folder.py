"""The folder with all files of a demo. A marker file identifies such a folder."""

import shutil
from pathlib import Path

from device_agent.formats.atomic_files import refuse_existing
from profiles.errors import InputError

MARKER = ".edgetailor-demo"
CURVE = "accuracy.png"
MODEL = "global.safetensors"
"""The file of the global model, here and in the coordinator's folder."""


class DemoFolder:
    """The files of a demo. `root` is absolute, so child processes may have any working folder."""

    def __init__(self, out: Path) -> None:
        self.root = out.absolute()
        self.config = self.root / "coordinator.toml"
        self.coordinator = self.root / "coordinator"
        self.data = self.root / "data"
        self.held_out = self.data / "held-out.npz"
        self.devices = self.root / "devices"
        self.bundles = self.root / "bundles"
        self.profiles = self.root / "profiles"
        self.new_digits = self.data / "new-digits.npy"
        self.deployed = self.root / "deployed"
        self.cards = self.root / "deployed.json"
        self.int8 = self.root / "deployed-int8"
        self.int8_card = self.root / "deployed-int8.json"
        self.predictions = self.root / "predictions"
        self.larger_model = self.root / "larger-model"
        self.larger_memory = self.root / "larger-model.json"
        self.logs = self.root / "logs"
        self.baselines = self.root / "baselines.json"
        self.model = self.root / MODEL
        self.curve = self.root / CURVE
        self.report = self.root / "report.json"

    def create(self, force: bool) -> None:
        """Make the folder and its subfolders. Raises InputError as `check_place` does."""
        self.check_place(force)
        if self.root.exists():
            shutil.rmtree(self.root)
        for folder in (
            self.data,
            self.devices,
            self.bundles,
            self.profiles,
            self.logs,
            self.predictions,
        ):
            folder.mkdir(parents=True)
        (self.root / MARKER).write_text("Made by `edgetailor demo`, which may replace it.\n")

    def check_place(self, force: bool) -> None:
        """Raise InputError if the folder exists.

        With `force`, a folder that an earlier demo wrote may exist.
        """
        refuse_existing(self.root, force)
        if self.root.exists() and not (self.root / MARKER).is_file():
            raise InputError(
                "{file} is not the folder of an earlier demo, so --force does not replace it: "
                "give another place with --out.",
                code="file.not-replaceable",
                file=str(self.root),
            )

    def state_of(self, device: str) -> Path:
        """The state folder of the agent of `device`."""
        return self.devices / device

    def data_of(self, device: str) -> Path:
        """The local data of `device`."""
        return self.data / f"{device}.npz"
