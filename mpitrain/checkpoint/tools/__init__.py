"""What people do with checkpoints: `mpitrain checkpoint inspect`, `verify`, `diff`, `reshard`.

command                       the command line
listing, inspecting           what is in a run, in a checkpoint, in a file of another program
verifying                     every damage of a checkpoint, in one pass
comparing, reports            how two differ
dealing, resharding, onefile  the same tensors in other files, or in one
source                        what all of them read: a folder, a run or one file, a bounded piece at a time
wording, progress             how it is said
"""
