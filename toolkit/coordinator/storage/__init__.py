"""The coordinator's state on disk: database, files by hash, devices and tokens.

Start with `coordinator_store.py`.
"""
