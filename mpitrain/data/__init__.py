"""Data: where the text comes from (corpus), in which order it is read (order), and batches of it (tokens)."""
