"""The rules that predict the memory and the time of training on a device.

Start with `prediction.py`. `memory_rule.py` states the rule for memory and `operation_rates.py` the
rule for time. `workload.py` describes their input, and `submodel_choice.py` applies budgets to the
predictions. Nothing here reads a graph: `exporters/` describes graphs as workloads.
"""
