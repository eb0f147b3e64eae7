"""Importing this exports one small graph: what torch sets up for its first export is then done.

It also records the models that most commands of tests are about. Commands in processes that are
forked from here need not record them again.
"""

import gc
from typing import Any

import torch
from torch import nn

from command_models import NETS
from exporters.export import compile_graphs
from exporters.recording import capture
from models_for_tests import INPUT_SHAPE, smooth_cnn
from shared_recordings import record_once
from toolkit.models.digits_cnn import digits_cnn
from toolkit.splitting import split

torch.set_num_threads(1)
compile_graphs(split(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "full", (2, 2)).program)
capture.record_and_check = record_once
NETWORKS: dict[str, Any] = {"__name__": "nets"}
exec(NETS, NETWORKS)
for model, shape in (
    (NETWORKS["tiny"](), (1, 6, 6)),
    (digits_cnn(), (1, 8, 8)),
    (smooth_cnn(), INPUT_SHAPE),
):
    capture.capture(model, shape)
gc.freeze()  # commands that are forked from here need not look through all this for garbage
