"""`mpitrain compare RUN1 RUN2`: the first op, message or parameter at which two runs part.

    wholes.py       sums of ranks, added up to those of whole values
    bounds.py       how far two sums may be from each other by rounding
    drift.py        and how much farther in the course of a run
    sides.py        what the ranks of one run have written
    walk.py         both runs in the order of the program, up to where they part
    beside.py       what is told beside distances: replicas, messages, rules of states
    findings.py     what was compared
    sources.py      what a run has left: digests, metrics, checkpoints, a recording
    settings.py     what they were told to do, and with which versions
    curves.py       runs without digests: by their numbers of each step
    saved.py        and by their checkpoints
    recordings.py   two recordings, message by message
    report.py       the words
    command.py      the command line

What digests are, and who takes them: mpitrain/debug/digests.
"""
