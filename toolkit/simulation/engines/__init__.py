"""Engines of a simulation. An engine trains the chunks of a round. Each engine is one file.

An engine has two functions, see `engine.py`. All engines train the same chunks with the same
`ChunkTrainer` and return results in the same order, so the global model does not depend on the
engine.
"""
