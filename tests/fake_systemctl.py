"""A script in place of systemctl, which records its arguments."""

import os
from pathlib import Path


def with_systemctl(folder: Path, body: str = "exit 0") -> dict[str, str]:
    """Write the script to `folder`; it is version 257, and then runs `body`.

    Returns the variables with which a command finds it. The arguments are in the file `asked`.
    """
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    script = f'[ "$1" = --version ] && {{ echo systemd 257; exit; }}\necho "$@" >> {folder}/asked\n'
    (tools / "systemctl").write_text(f"#!/bin/sh\n{script}{body}\n")
    (tools / "systemctl").chmod(0o755)
    return {"XDG_CONFIG_HOME": str(folder / "config"), "PATH": f"{tools}:{os.environ['PATH']}"}
