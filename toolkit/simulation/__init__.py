"""Simulating a federation: many clients on one machine or a cluster, no bundles, no network.

Start with `simulate.py`. `rounds.py` makes chunks of clients, and one of the `engines/` has them
trained. `torch_executor.py` trains a client exactly as an agent would, `partition.py` shares the
samples among the clients, `results.py` is the folder of a run.
"""
