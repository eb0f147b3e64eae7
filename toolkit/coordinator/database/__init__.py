"""The coordinator's database: its schema with upgrades, and its tables.

`storage/` reads and writes all of a state folder with it. Start with `database.py`.
"""
