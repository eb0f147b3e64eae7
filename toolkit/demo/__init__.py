"""`edgetailor demo`: the main job on this machine, with real processes and real data."""

from toolkit.demo.job import run_demo
from toolkit.demo.result import DemoResult

__all__ = ["DemoResult", "run_demo"]
