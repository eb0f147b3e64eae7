"""The same federation by each peer: how its server and clients start, and what they have done."""

import os
import re
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from peers.processes import Processes, Wire, free_port, until
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
SOURCES = Path(__file__).parent
ENVIRONMENTS = ROOT / ".venv-peers"


class Federation(ABC):
    """A server and its clients. Clients connect through `wire`, which counts bytes.

    Attributes:
        written: The files that a user writes beside the model, in the peer's folder here.
        imports: What a client's process imports before it trains.
    """

    environment: ClassVar[str]
    written: ClassVar[tuple[str, ...]]
    imports: ClassVar[str]

    def __init__(self, folder: Path, clients: int, rounds: int) -> None:
        self.folder, self.clients, self.rounds = folder, clients, rounds
        self.bin = ENVIRONMENTS / self.environment / "bin"
        self.port = free_port()
        self.wire = Wire(self.port)
        self.processes = Processes(
            folder,
            {
                "HOME": str(folder),
                "OMP_NUM_THREADS": "1",
                "FLWR_TELEMETRY_ENABLED": "0",
                "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            },
        )

    def start(self) -> None:
        """Start the server and all clients, and wait until they idle."""
        self.prepare()
        self.start_server()
        for number in range(1, self.clients + 1):
            self.start_client(number)
        until(self.idle, "all clients idle")

    def said(self, pattern: str) -> int:
        """How often the server's log has `pattern`."""
        return len(re.findall(pattern, self.processes.log("server")))

    def each_said(self, text: str) -> bool:
        names = [f"site-{number}" for number in range(1, self.clients + 1)]
        return all(text in self.processes.log(name) for name in names)

    def copied(self, to: str) -> Path:
        """A folder with what the user writes, and the model."""
        folder = self.folder / to
        folder.mkdir()
        for name in self.written:
            shutil.copy(SOURCES / self.environment / name, folder)
        shutil.copy(self.folder / "net.py", folder)
        return folder

    @abstractmethod
    def prepare(self) -> None: ...

    @abstractmethod
    def start_server(self) -> None: ...

    @abstractmethod
    def start_client(self, number: int) -> None: ...

    @abstractmethod
    def idle(self) -> bool: ...

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def done(self) -> int:
        """How many rounds are over."""

    @abstractmethod
    def result(self) -> dict[str, Tensor] | None:
        """The model after the last round, once it is there."""


class EdgeTailor(Federation):
    """`edgetailor serve` and `edgetailor-agent`, as the coordinator's guide says."""

    environment = "edgetailor"
    written = ("federation.toml",)
    imports = "import device_agent.federation.round_loop, device_agent.runtime.onnx_runtime"

    def prepare(self) -> None:
        text = (SOURCES / self.environment / "federation.toml").read_text()
        values = {
            "shape": (self.folder / "shape.json").read_text(),
            **{"rounds": self.rounds, "port": self.port, "clients": self.clients},
        }
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", str(value))
        (self.folder / "federation.toml").write_text(text)

    def start_server(self) -> None:
        edgetailor = ROOT / ".venv" / "bin" / "edgetailor"
        self.processes.start("server", [edgetailor, "serve", "federation.toml"])
        token = self.folder / "state" / "tokens" / "client.token"
        until(token.exists, "there is a token")

    def start_client(self, number: int) -> None:
        """The last one joins in `begin`: with it the first round opens."""
        if number < self.clients or (self.folder / f"state-{number}").exists():
            self._start_agent(number)

    def _start_agent(self, number: int) -> None:
        agent, state = self.bin / "edgetailor-agent", f"state-{number}"
        if not (self.folder / state).exists():
            url = f"http://127.0.0.1:{self.wire.port}"
            token = ["--token-file", "state/tokens/client.token", "--state", state]
            self.processes.run([agent, "join", url, *token])
        data = ["--data", f"site-{number}.npz", "--state", state]
        self.processes.start(f"site-{number}", [agent, "run", *data, "--seed", number])

    def idle(self) -> bool:
        return self.said("has joined:") == self.clients - 1

    def begin(self) -> None:
        self._start_agent(self.clients)

    def done(self) -> int:
        return max(self.said(r"Round \d+ of \d+: accuracy") - 1, 0)

    def result(self) -> dict[str, Tensor] | None:
        if not self.said("All rounds are done"):
            return None
        return load_file(self.folder / "state" / "global.safetensors")


class Flower(Federation):
    """A SuperLink and SuperNodes with PyTorch, as "Run Flower with the Deployment Runtime" says."""

    environment = "flower"
    written = ("pyproject.toml", "client_app.py", "server_app.py")
    imports = "import torch, flwr.app, flwr.clientapp"

    def prepare(self) -> None:
        self.app = self.copied("app")
        home = self.folder / ".flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )

    def start_server(self) -> None:
        options = ["--insecure", "--disable-runtime-dependency-installation", "--port", self.port]
        starts = self.said("SuperLinkLifespan: start")
        self.processes.start("server", [self.bin / "flower-superlink", *options])
        until(lambda: self.said("SuperLinkLifespan: start") > starts, "the SuperLink is up")

    def start_client(self, number: int) -> None:
        options = ["--insecure", "--superlink", f"127.0.0.1:{self.wire.port}"]
        options += ["--port", str(free_port())]
        options += ["--node-config", f'data="{self.folder}/site-{number}.npz"']
        self.processes.start(f"site-{number}", [self.bin / "flower-supernode", *options])

    def idle(self) -> bool:
        return self.each_said("Starting Flower SuperExec")

    def begin(self) -> None:
        config = f'folder="{self.folder}" clients={self.clients} rounds={self.rounds}'
        self.processes.run([self.bin / "flwr", "run", self.app, "here", "--run-config", config])

    def done(self) -> int:
        return self.said("Push replies from") // self.clients

    def result(self) -> dict[str, Tensor] | None:
        path = self.folder / "result.pt"
        return torch.load(path) if path.exists() else None


class NVFlare(Federation):
    """Startup kits of `nvflare provision`, and a recipe's job with the Client API and PyTorch."""

    environment = "nvflare"
    written = ("project.yml", "job.py", "client.py")
    imports = "import torch, nvflare.client"

    def prepare(self) -> None:
        job = self.copied("job")
        clients = "\n".join(
            f"  - name: site-{number}\n    type: client\n    org: peer\n"
            f"    connect_to:\n      host: localhost\n      port: {self.wire.port}"
            for number in range(1, self.clients + 1)
        )
        text = (job / "project.yml").read_text()
        text = text.replace("{port}", str(self.port)).replace("{clients}", clients)
        (self.folder / "project.yml").write_text(text)
        run, export = self.processes.run, ["--export", "--export-dir", self.folder / "exported"]
        run([self.bin / "nvflare", "provision", "-p", "project.yml", "-w", "workspace"])
        numbers = [self.folder, self.clients, self.rounds]
        run([self.bin / "python", "job.py", *numbers, *export], where=job)
        self.kits = self.folder / "workspace" / "peer" / "prod_00"

    def start_server(self) -> None:
        self._start("server")

    def start_client(self, number: int) -> None:
        self._start(f"site-{number}")

    def _start(self, name: str) -> None:
        self.processes.start(name, ["bash", self.kits / name / "startup" / "sub_start.sh"])

    def idle(self) -> bool:
        return self.each_said("Successfully registered")

    def begin(self) -> None:
        kit = ["--startup-kit", self.kits / "admin@peer.org"]
        job = self.folder / "exported" / "peer"
        self.processes.run([self.bin / "nvflare", "job", "submit", "-j", job, *kit])

    def done(self) -> int:
        return max(self.said(r"Round \d+ started") - 1, 0) + self.said("Finished FedAvg")

    def result(self) -> dict[str, Tensor] | None:
        found = list(self.kits.glob("server/*/app_server/FL_global_model.pt"))
        if not found or not self.said("Finished FedAvg"):
            return None
        return {
            name: torch.as_tensor(value) for name, value in torch.load(found[0])["model"].items()
        }


PEERS = {"EdgeTailor": EdgeTailor, "Flower": Flower, "NVFLARE": NVFlare}
