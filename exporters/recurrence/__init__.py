"""LSTM, GRU and plain recurrent layers as loops over time.

Start with `recurrent_layers.py`. Writers turn the one loop operator (`loop_operator.py`) into what
their runtime has.
"""
