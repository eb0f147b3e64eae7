"""The runtimes that execute graphs: one module for each, chosen by the manifest's `runtime`.

Start with `runtime_choice.py`. A runtime loads a graph and runs it on numpy arrays. It does not
know schedules or submodel families.
"""
