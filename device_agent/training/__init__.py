"""Trains a bundle on this device. Network code is in `client/` and `federation/`.

Start with `standalone_training.py` (the command `train`) and `bundle_training.py`. Then read:

- `schedule_interpreter.py`: runs the instructions of the bundle's schedule. It uses
  `resumable_run.py` (position and checkpoints) and `signature_runs.py` (inputs and outputs).
- `batching.py` splits the data into batches. `activation_cache.py` stores recorded activations.
- `training_folder.py`, `checkpoint.py`: temporary files, and resuming a killed training.
- `memory_limits.py`: the memory limits of this process. `memory_estimate.py`: the memory that a
  training needs. `memory_refusal.py`: the refusal of a training that needs too much memory.
- `execution_plan.py`: how this device runs the bundle. `form_choice.py` chooses the form of its
  graphs; `form_check.py` compares this form with the plain graphs.
- `personal_model.py`: the personal tensors; `round_profile.py`: time and memory of a round.
"""
