"""Partial aggregates: sums of updates as files. One machine merges the files of other machines."""
