"""Following channels through a captured graph, and building the network with fewer of them.

Start with `narrowing.py`. A rule says for one operator which axes of its inputs and outputs have
the same channels.
"""
