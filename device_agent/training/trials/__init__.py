"""First steps that are tried before a training: do runtimes and forms agree, and how fast are they?

- `fastest_runtime.py`: compares runtimes, and chooses the fastest of those that agree.
- `form_check.py`: compares the form of the graphs that this device runs with the plain graphs.
- `runtime_trial.py`: one trial of a runtime, in a process of its own.
- `remembered_trials.py`: the file in which results are kept.
"""
