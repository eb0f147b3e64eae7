"""What a model is trained for: built-in losses, their weighted sums, and the user's own losses."""
