"""A whole emulated board: a 64-bit ARM computer under QEMU, whose power can be cut.

`tests/board/make_image.sh` makes the image. A board writes to an overlay of its own. A board that
is `saved` can be started again from that moment in seconds, as often as wanted.
"""

import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands import free_port

HOST = "10.0.2.2"
"""The address under which a board reaches this machine."""
BOOT_S = 1200.0
COMMAND_S = 900.0
PROMPT = b"(qemu) "
OUTPUT: dict[str, Any] = {
    **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    **{"text": True, "errors": "replace"},
}
"""Options of a process whose output is read."""
MACHINE = """
qemu-system-aarch64 -M virt -cpu cortex-a72 -smp 2 -accel tcg,thread=multi -display none
-device virtio-blk-pci,drive=disk,romfile= -device virtio-scsi-pci,romfile=
-device virtio-net-pci,netdev=net,romfile= -device virtio-rng-pci,romfile=
"""
KERNEL = "root=/dev/vda rw console=ttyAMA0 quiet systemd.getty_auto=no"
STATE_MOUNT = "/home/pi/.local/state"


class BoardError(AssertionError):
    """A board did not start, or a command on it failed."""


@dataclass
class Done:
    """How a command on a board ended; `text` is what it wrote to stdout and stderr."""

    code: int
    text: str


def overlay(disk: Path, base: Path) -> Path:
    """Make `disk` a new disk whose content is that of `base` until it is written."""
    disk.unlink(missing_ok=True)
    form = "raw" if base.suffix == ".raw" else "qcow2"
    _host("qemu-img", "create", "-q", "-f", "qcow2", "-F", form, "-b", str(base), str(disk))
    return disk


def new_state_disk(disk: Path, megabytes: int = 64) -> Path:
    """Make a disk for the state of an agent, owned by the board's user."""
    disk.unlink(missing_ok=True)
    _host("truncate", "-s", f"{megabytes}M", str(disk))
    _host("mke2fs", "-q", "-t", "ext4", "-m", "0", "-E", "root_owner=1000:1000", str(disk))
    return disk


def files_of(disk: Path, folder: Path) -> Path:
    """The agent's state on a state disk as a board would find it after a power cut, in `folder`.

    A copy is checked and read; the disk stays as it is.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy = folder / "disk"
    shutil.copyfile(disk, copy)
    # It replays the journal and clears files that were deleted while open, as a mount does. An exit
    # code of 1 says that it did.
    _host("e2fsck", "-fp", str(copy), most=1)
    _host("debugfs", "-R", f"rdump /edgetailor-agent {folder}", str(copy))
    copy.unlink()
    return folder / "edgetailor-agent"


def _host(*command: str, most: int = 0) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode > most:
        raise BoardError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")


@dataclass
class Board:
    """One board.

    Attributes:
        image: The folder that `make_image.sh` has made.
        folder: A folder for the board's own files; its path must be short.
        memory: Memory in MB.
    """

    image: Path
    folder: Path
    memory: int = 512
    process: "subprocess.Popen[bytes] | None" = None
    port: int = field(default_factory=free_port)

    @property
    def console(self) -> Path:
        """What the board has written to its serial line."""
        return self.folder / "console"

    def start(self, disk: Path, saved: Path | None = None, *options: str) -> None:
        """Turn the power on, or continue from the moment that the file `saved` holds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        resumed = [] if saved is None else ["-incoming", f"exec:cat {saved}"]
        monitor = self.folder / "monitor"
        for old in (monitor, self.folder / "root", self.folder / "pi"):
            old.unlink(missing_ok=True)
        with (self.folder / "qemu.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *MACHINE.split(),
                    *("-m", str(self.memory)),
                    *("-kernel", str(self.image / "vmlinuz")),
                    *("-initrd", str(self.image / "initrd.img")),
                    *("-append", " ".join([KERNEL, *options])),
                    *("-drive", f"file={disk},if=none,id=disk,cache=writeback"),
                    *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.port}-:22"),
                    *("-serial", f"file:{self.console}"),
                    *("-monitor", f"unix:{monitor},server=on,wait=off"),
                    *resumed,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait_for_ssh()
        if saved is not None:
            self.root(f"date -s @{time.time():.0f}")  # its clock stood still

    def _wait_for_ssh(self) -> None:
        assert self.process is not None
        until = time.monotonic() + BOOT_S
        while self._ssh("root", "true", BOOT_S).code:
            if self.process.poll() is not None:
                raise BoardError((self.folder / "qemu.log").read_text())
            if time.monotonic() > until:
                raise BoardError(self.console.read_text(errors="replace")[-2000:])
            time.sleep(0.5)

    def _command(self, user: str, command: str) -> list[str]:
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        options += ["ConnectTimeout=60", "BatchMode=yes"]
        # One connection for all commands of a user: each costs an emulated board seconds.
        options += ["ControlMaster=auto", "ControlPersist=yes", f"ControlPath={self.folder}/%r"]
        words = [word for option in options for word in ("-o", option)]
        identity = ["-i", str(self.image / "id"), "-p", str(self.port)]
        return ["ssh", *identity, *words, f"{user}@127.0.0.1", command]

    def _ssh(self, user: str, command: str, limit_s: float) -> Done:
        try:
            done = subprocess.run(self._command(user, command), timeout=limit_s, **OUTPUT)
        except subprocess.TimeoutExpired as late:
            return Done(124, (late.stdout or b"").decode(errors="replace"))
        return Done(done.returncode, done.stdout)

    def run(self, command: str, *, user: str = "pi", limit_s: float = COMMAND_S) -> Done:
        """Run a shell command on the board."""
        return self._ssh(user, command, limit_s)

    def ok(self, command: str, *, user: str = "pi", limit_s: float = COMMAND_S) -> str:
        """Run a shell command that must succeed; what it wrote."""
        done = self.run(command, user=user, limit_s=limit_s)
        if done.code:
            raise BoardError(f"{command}: exit code {done.code}\n{done.text}")
        return done.text

    def root(self, command: str) -> str:
        """Run a shell command as root that must succeed; what it wrote."""
        return self.ok(command, user="root")

    def follow(self, command: str, user: str = "pi") -> "Lines":
        """Start a shell command whose output can be read while it runs."""
        return Lines(subprocess.Popen(self._command(user, command), **OUTPUT))

    def put(self, file: Path, place: str) -> None:
        """Copy a file of this machine to the board's user."""
        with file.open("rb") as source:
            subprocess.run(
                self._command("pi", f"cat > {shlex.quote(place)}"), stdin=source, check=True
            )

    def get(self, folder: str, to: Path) -> None:
        """Copy the files in a folder of the board to this machine."""
        to.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            self._command("pi", f"tar -C {shlex.quote(folder)} -cf - ."), stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-C", str(to), "-xf", "-"], input=packed.stdout, check=True)

    def attach(self, disk: Path, mount: str = STATE_MOUNT) -> None:
        """Plug a state disk in, and mount it."""
        name = "state"
        self.monitor(f"drive_add 0 if=none,id={name},file={disk},format=raw,cache=writeback")
        self.monitor(f"device_add scsi-hd,drive={name},id={name}")
        self.root(
            "for _ in $(seq 60); do [ -b /dev/sda ] && break; sleep 0.5; done; "
            f"mkdir -p {mount} && mount -o noatime /dev/sda {mount}"
        )

    def pretend_boot(self) -> None:
        """Give the kernel another boot id: a board that was saved continues as if it had booted."""
        self.root(
            "cat /proc/sys/kernel/random/uuid > /run/boot-id; "
            "mount --bind /run/boot-id /proc/sys/kernel/random/boot_id"
        )

    def detach(self, mount: str = STATE_MOUNT) -> None:
        """Unmount a state disk, and unplug it."""
        self.root(f"umount {mount}")
        self.monitor("device_del state")
        self.root("for _ in $(seq 60); do [ -b /dev/sda ] || break; sleep 0.5; done")

    def cut(self) -> None:
        """Cut the power: what the board's kernel has not written yet is lost."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def save(self, to: Path) -> None:
        """Save the board in the file `to` as it is now, and end it."""
        self.root("sync")
        self.monitor("migrate_set_parameter max-bandwidth 8G")
        self.monitor(f'migrate "exec:cat > {to}"')
        self.cut()

    def monitor(self, command: str) -> str:
        """Give QEMU's monitor a command; its answer."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(300)
            line.connect(str(self.folder / "monitor"))
            _until_prompt(line)
            line.sendall(command.encode() + b"\n")
            answer = _until_prompt(line)
        if "Error" in answer or "error" in answer:
            raise BoardError(answer)
        return answer


def _until_prompt(line: socket.socket) -> str:
    text = b""
    while not text.endswith(PROMPT) and (piece := line.recv(4096)):
        text += piece
    return text.decode(errors="replace")


class Lines:
    """The lines of a process that runs on a board."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        """All lines until now."""
        return "\n".join(self.lines)

    def until(self, pattern: str, count: int = 1, limit_s: float = 900.0) -> str:
        """Wait for the line with that number which contains `pattern`."""
        end = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            found = [line for line in list(self.lines) if re.search(pattern, line)]
            if len(found) >= count:
                return found[count - 1]
            if ended or time.monotonic() > end:
                raise BoardError(f"no {pattern!r} ({count}) in:\n{self.text}")
            time.sleep(0.005)

    def end(self) -> None:
        """End the connection; the board or its program is gone already."""
        self.process.kill()
        self.process.wait()
