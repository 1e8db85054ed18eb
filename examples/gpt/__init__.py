"""A small character-level GPT, trained on the Python standard library's own sources."""
