"""What the operator does with a running federation: see devices, and act on them.

`device_actions.py` has the actions. The routes of `http/operator_api.py` and the commands of
`cli/operator_commands.py` only call them.
"""
