"""The operator's work in a running federation: look at devices, and act on them.

`device_actions.py` has the actions. The routes of `http/operator_api.py` and the commands of
`cli/operator/` only call them.
"""
