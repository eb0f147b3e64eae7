"""Differential privacy for devices: clipped changes, Gaussian noise, and the spent budget."""
