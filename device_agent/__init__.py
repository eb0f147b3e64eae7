"""The agent: trains and profiles bundles on a device, without any training framework."""
