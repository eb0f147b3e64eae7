"""`edgetailor demo`: the main job on this machine, with real processes and real data."""

from toolkit.demo.demo_result import DemoResult
from toolkit.demo.run_demo import run_demo

__all__ = ["DemoResult", "run_demo"]
