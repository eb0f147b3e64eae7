"""The agent: trains and profiles bundles on a device, without any training framework.

Start with `federation/round_loop.py` (a device in a federation) or
`training/standalone_training.py` (one round without a coordinator). Each subpackage imports only
from the subpackages to its right: cli > service, doctor > federation > client, inference, profiling
> training > data, runtime > system > formats. This package may not import torch, onnx, `exporters`
or `toolkit`.
"""

import os

__version__ = "0.2.0"
"""The version of EdgeTailor, which the build reads here."""
# From version 1.29, onnxruntime sends Microsoft reports about models and devices, unless this
# variable is set before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
