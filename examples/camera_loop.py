"""Names what a camera sees, once a second: on a Raspberry Pi, with a model that its fleet trained.

    pip install 'edgetailor[images]'
    python camera_loop.py deployed/board

The camera program writes one picture; `rpicam-still` is part of Raspberry Pi OS.
"""

import subprocess
import sys
import time
from pathlib import Path

from edgetailor import EdgeTailorError, Predictor

CAMERA = ["rpicam-still", "--nopreview", "--immediate", "--timeout", "1", "--output"]
SURE = 0.6
"""A class with a lower probability is not reported."""


def watch(bundle: Path, picture: Path, camera: list[str], pictures: int) -> None:
    """Take `pictures` pictures with the command `camera`, and print what the model sees."""
    predictor = Predictor(bundle, threads=1)
    for _ in range(pictures):
        subprocess.run([*camera, str(picture)], check=True, timeout=30)
        try:
            [prediction] = predictor.predict_files(picture)
        except EdgeTailorError as error:  # a picture that was cut off, for example
            print(error, file=sys.stderr)
            continue
        best = int(prediction.values.argmax())
        if prediction.values[best] >= SURE:
            print(f"{predictor.classes[best]} ({prediction.values[best]:.0%})", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    watch(Path(sys.argv[1]), Path("/tmp/camera.jpg"), CAMERA, pictures=sys.maxsize)
