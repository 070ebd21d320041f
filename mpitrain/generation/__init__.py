"""`mpitrain generate`: what a checkpoint's model writes after a prompt, on one rank or on any layout.

    command.py    the words of the command line, and what is printed
    weights.py    from a checkpoint to a model on this rank's part of a mesh
    prompts.py    the texts that are to be continued, and how words become numbers
    turns.py      some ranks write, the others wait and hear how far they are

How tokens are chosen stands in `mpitrain.models.sampling`, how they are made one by one in `mpitrain.models.generate`.
"""
