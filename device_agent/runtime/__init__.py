"""The runtimes that execute graphs: one module for each, chosen by the manifest's `runtime`.

Start with `runtime_choice.py`. A runtime loads a graph and runs it on numpy arrays; it knows
nothing about schedules or families.
"""
