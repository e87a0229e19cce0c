"""What the vectors are made of: a module for each codec, and buffer.py for what all have."""
