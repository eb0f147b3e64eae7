"""The rules that predict the memory and the time of training on a device.

Start with `prediction.py`. `workload.py` is what the rules read, `submodel_choice.py` applies
budgets to what they predict. No graph is read here: `exporters/` describes graphs as workloads.
"""
