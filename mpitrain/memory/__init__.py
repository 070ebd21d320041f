"""Activations that do not fit: which of them are made again."""
