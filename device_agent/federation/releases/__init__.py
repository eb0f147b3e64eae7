"""A device and the releases of its federation: switching to one, its trials, and fine-tuning."""
