"""The devices of a federation: checks of join requests, the submodel of each device, its activity.

Start with `join_validation.py`.
"""
