"""TFLite graphs from traced ATen graphs: a flatbuffer builder, lazy layouts, one table of forms."""
