"""`mpitrain verify`: is a layout the same training run as one rank?

    mpitrain verify --layout dp2,tp2 SCRIPT [args]

runs the script on one rank, and on four with `--dp 2 --tp 2` appended, from the same seed, in float64 and deterministic
mode, and compares the loss, every gradient, the norm, every weight and every optimizer state of each step.  No script
knows of it.

    command    the command line
    layouts    words -> flags
    every      all factorisations of a number of ranks, with every way
    launch     runs as child processes, their output and their records
    run        the inside of such a run
    whole      slabs of all ranks -> full tensors, replicas
    judge      full tensors -> a verdict, in the order of execution
    routed     what experts were asked for, and the router's losses
    noise      weights that only rounding has moved
    stale      the replay that a pipeline which never drains should equal
    obeyed     has the script run what it was told?
    suspect    a verdict -> where to look
    proof      all of it, for a list of layouts
    here       record a function instead of a script, in this process
    cases      random models, layouts and options
    sweep      proves many of them, in this process
    report     text and JSON
"""
