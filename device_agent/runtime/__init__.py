"""The runtimes that execute graphs. Each has a module, which the manifest's `runtime` selects.

Start with `runtime_choice.py`. A runtime loads a graph and runs it on numpy arrays. Runtimes do not
know schedules or submodel families.
"""
