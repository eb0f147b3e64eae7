"""The agent as a systemd service: its unit, its options file, and notifications to systemd.

Start with `systemd_service.py`. Other services also use `systemd_units.py`.
"""
