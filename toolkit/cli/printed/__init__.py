"""What the commands print: tables and other text for people."""
