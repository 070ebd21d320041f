"""Weights in the layout of Hugging Face's transformers: `mpitrain checkpoint import` and `export`, GPT-2 and Llama.

command               the command line
importing, exporting  a folder of theirs becomes a run, a checkpoint becomes a folder of theirs
names, pairs          what each tensor is called there, and how its elements lie
settings              config.json
weights, header       their files, read as from a stranger
numbers, library      dtypes; the safetensors library, which reads and writes the files
"""
