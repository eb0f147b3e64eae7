"""Partial aggregates: sums of updates as files, which another machine merges with others."""
