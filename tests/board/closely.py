"""On the board: `edgetailor-agent` with a checkpoint after every batch, and a line for each write.

    python closely.py run --data local.npz --threads 1

The device runs Winograd's form of graphs, or with FORM=plain the unchanged graphs: which is faster
here, an emulated processor's times would say by chance. With KEPT, a copy of each checkpoint and
recording goes to this folder. With SLOW, each flush and rename waits for so many seconds before and
after, as on a slow disk.
"""

import os
import shutil
import sys
import time

from device_agent.federation import release_folder
from device_agent.runtime import graph_form
from device_agent.training import checkpoint, schedule_interpreter

schedule_interpreter.CHECKPOINT_S = schedule_interpreter.PROGRESS_S = 0.0
FORM = os.environ.get("FORM", "winograd")
graph_form.multiplies_faster = lambda: FORM == "winograd"
KEPT, SLOW = os.environ.get("KEPT"), float(os.environ.get("SLOW", "0"))
save = checkpoint.Checkpoints.save
write = release_folder.DeviceReleases.write


def say(text):
    print(text, file=sys.stderr, flush=True)


def save_and_tell(self, written):
    place = written.position
    say(f"Writing checkpoint {place.instruction}-{place.epoch}-{place.batch}")
    save(self, written)
    if KEPT:
        name = f"{place.instruction}-{place.epoch}-{place.batch}.safetensors"
        shutil.copy(self.folder / checkpoint.CHECKPOINT, os.path.join(KEPT, name))
        for path in self.folder.glob("*.npy"):
            shutil.copy(path, KEPT)
    say(f"Checkpoint {place.instruction}-{place.epoch}-{place.batch} is written")


def write_and_tell(self, pointer):
    say("Writing release.json")
    write(self, pointer)


def slowly(call):
    def slow(*arguments, **options):
        time.sleep(SLOW)
        try:
            return call(*arguments, **options)
        finally:
            time.sleep(SLOW)

    return slow


checkpoint.Checkpoints.save = save_and_tell
release_folder.DeviceReleases.write = write_and_tell
if SLOW:
    os.fsync, os.replace = slowly(os.fsync), slowly(os.replace)

if __name__ == "__main__":
    from device_agent.cli import main

    main()
