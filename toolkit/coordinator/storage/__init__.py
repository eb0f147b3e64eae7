"""The coordinator's state folder: its files by hash, saved rounds, checks and backup.

Start with `coordinator_store.py`.
"""
