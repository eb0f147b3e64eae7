"""The agent as a systemd service: its unit, its options file, and notifications to systemd.

Start with `systemd_service.py`. `systemd_units.py` serves other services, too.
"""
