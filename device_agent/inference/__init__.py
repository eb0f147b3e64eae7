"""Predicts with a bundle on this device, without any training framework."""
