"""The objectives of training: built-in losses, their weighted sums, and the user's own losses."""
