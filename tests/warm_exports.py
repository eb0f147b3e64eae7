"""Importing this exports one small graph: what torch sets up for its first export is then done."""

import gc

import torch
from torch import nn

from exporters.export import compile_graphs
from toolkit.splitting import split

torch.set_num_threads(1)
compile_graphs(split(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "full", (2, 2)).program)
gc.freeze()  # commands that are forked from here need not look through all this for garbage
