"""Combines several coordinators by Flower: a strategy on the server, and a gateway at each site."""
