"""The federation's file: its tables and keys, the rules between them, and how it is read."""
