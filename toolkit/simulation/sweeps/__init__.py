"""Sweeps: a simulation for each combination of values of settings, and a comparison of their costs.

Start with `sweep.py`. `grid.py` reads the values of `--grid`. `trade_offs.py` finds the best
results within limits and the Pareto front, and `trade_off_plot.py` draws this front.
"""
