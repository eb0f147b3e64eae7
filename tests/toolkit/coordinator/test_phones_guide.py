"""The example of docs/guides/phones.md, with agents in the place of phones."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server
from vector_fleet import DOCS, full_token

GUIDE = (DOCS / "guides" / "phones.md").read_text()


def block(language: str, file: str) -> str:
    """The code of `file` in the guide."""
    match = re.search(rf"in `{file}`.*?```{language}\n(.*?)```", GUIDE, re.DOTALL)
    assert match is not None
    return match[1]


def pictures(folder: Path, seed: int) -> Path:
    """Red ones and green ones."""
    draw = np.random.default_rng(seed)
    for channel, name in enumerate(("ripe", "unripe")):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            values = draw.integers(90, size=(40, 50, 3), dtype=np.uint8)
            values[..., channel] += 150
            Image.fromarray(values).save(folder / name / f"{number}.png")
    return folder


def test_the_complete_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    (tmp_path / "tomatoes.py").write_text(block("python", "tomatoes.py"))
    file = tmp_path / "tomatoes.toml"
    text = block("toml", "tomatoes.toml").replace("rounds = 10", "rounds = 1\nport = 0")
    file.write_text(text)
    pictures(tmp_path / "held_out", seed)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(file)
    assert config.expected_devices == 2
    server = Server(config, federation(config), file)
    threads = [threading.Thread(target=server.run)]
    threads[0].start()
    try:
        for number in (1, 2):
            state, data = tmp_path / f"state-{number}", pictures(tmp_path / f"{number}", number)
            join(server.url, full_token(config, "phone"), f"phone {number}", state)
            options = RunOptions(data=str(data), state=state)
            threads.append(
                threading.Thread(
                    target=round_loop.run, args=(options,), kwargs={"sleep": lambda seconds: None}
                )
            )
            threads[-1].start()
        for thread in threads[1:]:
            thread.join(120)
        before, after = server.coordinator.status().history
    finally:
        server.stop()
        threads[0].join()
    assert after.updates == 2
    assert after.loss < before.loss
