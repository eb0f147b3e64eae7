"""The messages of a recorded attempt: devices of different versions must understand each other.

Pages read the same file, in tests/toolkit/web/test_secure_page.py. If the protocol changes on
purpose, remove the file and run this test: it writes the file.
"""

import json
import random
from pathlib import Path

from secure_scripts import World, answers

VECTORS = Path(__file__).with_name("secure_vectors.json")


def test_an_agent_sends_the_recorded_messages() -> None:
    if not VECTORS.exists():
        world = World(random.Random(0))
        recorded = {"device": world.device, "script": world.honest()}
        recorded["answers"] = answers(world.device, world.honest())
        VECTORS.write_text(json.dumps(recorded, indent=1) + "\n")
    recorded = json.loads(VECTORS.read_text())
    assert answers(recorded["device"], recorded["script"]) == recorded["answers"]
