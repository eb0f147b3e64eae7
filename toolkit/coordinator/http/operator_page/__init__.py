"""The operator's page over HTTP: login, pages filled on the server, forms, and events.

Start with `routes.py`. The actions are in `operation/`.
"""
