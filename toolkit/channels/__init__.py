"""Following channels through a captured graph, and building the network with fewer of them.

`units` says which channels are one and the same, `following` walks the graphs and applies each
operator's rule (`weighted`, `recurrent`, `reshaping`, `layouts`, `plain`), which sees it as a
`step`; `narrowing` drops channels and records the smaller network.
"""
