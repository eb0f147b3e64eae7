"""Engines of a simulation: who trains the chunks of a round, one file for each.

An engine is made from a `WorkerSetup` and has two functions, see `engine.py`. All train the same
chunks by the same `ChunkTrainer` and return results in the same order, so that the global model
does not depend on the engine.
"""
