"""What a model is trained for: built-in losses, weighted sums of them, and the user's own."""
