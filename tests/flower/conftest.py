"""Flower is in an environment of its own: see `make test-flower`."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") else ["test_dense_rounds.py"]
