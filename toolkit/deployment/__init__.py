"""Deploys a trained model: an inference bundle for each kind of device, with a model card.

Start with `deploy.py`. `trained_model.py` reads the model of a federation's round.
"""
