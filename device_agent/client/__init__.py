"""The HTTP client for the coordinator: requests, retries, and checks of every reply.

Start with `coordinator_client.py`. What a device does between requests is in `federation/`.
"""
