"""The HTTP client for the coordinator: requests, retries, and checks of every reply.

Start with `coordinator_client.py`. `federation/` decides which requests a device makes.
"""
