"""The coordinator: enrols devices, offers bundles, takes updates and turns the rounds.

Start with `coordinator.py` (what devices may ask, without HTTP) and `round_worker.py` (what happens
between rounds). `http/` is the transport, `storage/` what survives a restart, `devices/` who may
take part, `rounds/` the rules of one round.
"""
