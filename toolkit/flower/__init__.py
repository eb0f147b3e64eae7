"""Fleets beyond one coordinator, by Flower: a strategy above, and a gateway at every site."""
