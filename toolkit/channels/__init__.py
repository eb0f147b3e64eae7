"""Following channels through a captured graph, and building the network with fewer of them.

`units` says which channels are one and the same, `following` walks the graphs and asks the `rules`
of each operator, `narrowing` drops channels and records the smaller network.
"""
