"""The page by which phones join: its sources in `phone/`, and how its build is served.

`make web` builds the page into `built/`. Start with `static_files.py`.
"""
