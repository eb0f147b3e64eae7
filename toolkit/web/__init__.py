"""The page for phones in `phone/`, the operator's page in `operator/`, and how both are served.

`make web` builds them into `built/`. Start with `static_files.py`.
"""
