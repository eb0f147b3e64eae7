"""Limits on the updates of simulated clients, the judge of new models, and the committee."""
