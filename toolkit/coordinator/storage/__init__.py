"""What the coordinator may not lose: database, files by hash, devices and tokens.

Start with `coordinator_store.py`.
"""
