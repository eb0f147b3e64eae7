"""From programs to deployable bundles: training steps as ordinary graphs."""

from exporters.export import compile_graphs, export

__all__ = ["compile_graphs", "export"]
