"""Tokenizers of runs: made or found at a start, the same on all ranks, and looked at on the command line.

start.py      which tokenizer a run uses, and the text in its words, on all ranks
command.py    `mpitrain tokenizer train|show`
"""
