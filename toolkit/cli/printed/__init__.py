"""Prints the results of commands: tables and other text for people."""
