"""Writes traced steps as TFLite files, with its own flatbuffer builder.

Start with `tflite_writer.py`, then `lowering.py`. XNNPACK is LiteRT's library of fast operators;
graphs use its operators where possible. Each table of operators is one file, whose name says what
its operators do.
"""
