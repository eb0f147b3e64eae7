"""Training a bundle: the schedule interpreter, local data, checkpoints, memory limits, update.

Start with `bundle_training.py`, then `schedule_interpreter.py`. No network code: that is
`client/` and `federation/`.
"""
