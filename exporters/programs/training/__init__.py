"""Training steps as one function: augmentation, loss, gradient and optimizer.

Start with `training_signatures.py`.
"""
