"""The operator's page: its templates, and the script and style that `make web` builds."""
