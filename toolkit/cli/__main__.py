"""Runs `edgetailor` as `python -m toolkit.cli`."""

from toolkit.cli import main

main()
