"""The console of `mpitrain debug`: all ranks of a script in lock step, stopped and looked at by commands."""
