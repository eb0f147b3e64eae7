"""The agent as a systemd service: unit and options files, and notifications to systemd.

Start with `systemd_service.py`.
"""
