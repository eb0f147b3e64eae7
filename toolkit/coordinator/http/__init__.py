"""The coordinator over HTTP: routes, request limits, connections and the socket.

Start with `http_api.py`. Rules about devices and rounds belong in `devices/` and `rounds/`.
"""
