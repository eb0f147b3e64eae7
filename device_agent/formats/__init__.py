"""The contracts between device and server: manifest, bundle, update, protocol, file writing.

Start with `manifest.py`. The server reads and writes the same formats through these modules.
Nothing here runs a graph or opens a connection.
"""
