"""Runs `edgetailor-agent` as `python -m device_agent.cli`."""

from device_agent.cli import main

main()
