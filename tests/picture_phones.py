"""Phones in a federation for pictures, on which a model is tried."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import nn

import sample_models
from device_agent.formats.preprocessing import Images
from phones import Phone, fleet
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.saved_rounds import model_file

CLASSES = ("cat", "dog", "owl")
DATA = """[data]
kind = "images"
classes = ["cat", "dog", "owl"]
mean = [0.4, 0.5, 0.6]
std = [0.2, 0.3, 0.4]"""
IMAGES = Images(classes=CLASSES, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
SHAPE = (3, 16, 12)
CLOSE = 1e-5
"""The largest difference of probabilities."""


def trained(browser: Any, server: Server, kind: str, files: list[Path]) -> Phone:
    """A phone that has joined and trains on `files`, which are of all classes."""
    phone = Phone.opened(browser, server, kind)
    phone.join(f"phone {kind}")
    for number, name in enumerate(CLASSES):
        field = phone.page.get_by_label(f"Pictures: {name}")
        field.set_input_files([str(file) for file in files[number::3]])
    phone.page.get_by_role("button", name=f"Use these pictures ({len(files)})").click()
    phone.start()
    return phone


def tried(phone: Phone, file: Path) -> dict[str, Any]:
    """The answer for `file`, as the worker has sent it to the page."""
    phone.page.evaluate("window.view.trial = null")
    phone.page.locator("#try-file").set_input_files(str(file))
    phone.wait_until("() => window.view.trial !== null && !window.view.trying")
    return phone.view()["trial"]


def with_tensors(tensors: dict[str, np.ndarray]) -> nn.Module:
    model = sample_models.pictures_with_statistics()
    values = {name: torch.from_numpy(value) for name, value in tensors.items()}
    model.load_state_dict(values | {k: v for k, v in model.state_dict().items() if "num" in k})
    return model


def shared_model(server: Server, round_: int) -> dict[str, np.ndarray]:
    """The tensors of the global model after `round_`."""
    tensors = load_file(model_file(server.config.state, round_))
    return {name: value for name, value in tensors.items() if not name.startswith("kept|")}


def prepared(folder: Path, **settings: Any) -> tuple[str, Path]:
    model = "sample_models:pictures_with_statistics"
    usual: dict[str, Any] = {
        "model": model,
        "batch_size": 4,
        "epochs": 3,
        "shape": SHAPE,
        "classes": 3,
    }
    return fleet(folder, top=DATA, **usual | settings)
