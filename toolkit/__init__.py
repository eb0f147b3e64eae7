"""The server side: cutting models, aggregating updates, coordinating rounds.

Start with `splitting.py` (a model and a spec in, a submodel out), `aggregation/federation.py`
(rounds without a network) or `coordinator/` (rounds over HTTP). Users import `edgetailor`.
"""
