"""A device's membership: its key and secret, the coordinator's key, and its state folder."""
