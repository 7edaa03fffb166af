"""A small character-level transformer in plain NumPy, with forge doing the attention."""
