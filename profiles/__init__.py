"""What a device is and can do: the profile document and the errors every package shares."""
