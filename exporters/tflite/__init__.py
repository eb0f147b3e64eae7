"""Writes traced steps as TFLite files, with its own flatbuffer builder.

Start with `tflite_writer.py`, then `lowering.py`. XNNPACK is LiteRT's library of fast operators. If
possible, graphs use operators that XNNPACK has. Each table of operators is one file, named after
the purpose of its operators.
"""
