"""`mpitrain replay`: one recorded rank alone, without MPI, the same bits, and where it does something else.

recorded.py    the trainer's side of a recording; size.py: how much it will take
forward.py     skips the steps before those that were recorded, and proves the others
run.py         the program again: the trainer, or the script that the user names
command.py     the command line; stop.py: Python's debugger at a place of the program
"""
