"""Simulating a federation in one process: many clients, no bundles, no network.

Start with `simulate.py`. `torch_executor.py` trains a client exactly as an agent would,
`partition.py` shares the samples among the clients, `results.py` is the folder of a run.
"""
