"""The coordinator enrols devices, offers bundles, receives updates and runs the rounds.

Start with `coordinator.py` (the requests of devices, without HTTP) and `closing/round_worker.py`
(the work between rounds).

- `http/`: the transport.
- `storage/`: the state that survives a restart.
- `devices/`: the checks and assignments of devices.
- `rounds/`: the rules of one round.
"""
