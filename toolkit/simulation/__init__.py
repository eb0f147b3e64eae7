"""Simulates a federation without bundles and network: many clients on a machine or a cluster.

Start with `simulate.py`. `rounds.py` makes chunks of clients, and an engine of `engines/` trains
them. `torch_executor.py` trains a client exactly as an agent would. `partition.py` shares the
samples among the clients. `results.py` reads and writes the folder of a run. `judging/` has the
limits of updates, the judge of the new model and the committee of clients.
"""
