"""Limits on each update, which follow from the updates of earlier rounds."""
