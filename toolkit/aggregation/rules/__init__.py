"""Rules against hostile devices, in place of the weighted mean, from changes kept in files."""
