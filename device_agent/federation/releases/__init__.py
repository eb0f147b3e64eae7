"""How a device handles the releases of its federation: trials, switching, and fine-tuning."""
