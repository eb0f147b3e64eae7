"""From programs to deployable bundles: training steps as ordinary graphs."""

from exporters.export import ExportedBundle, compile_graphs, export

__all__ = ["ExportedBundle", "compile_graphs", "export"]
