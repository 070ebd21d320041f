"""Recordings: what a rank sent and received in a run, so that it can be run again alone.

    lines.py      what stands in an index: one line a message, an answer, a step
    values.py     the files that hold the values, and how they are written and read
    writing.py    a rank's recording, as it is made
    reading.py    the same, as it is read: strict, and tolerant of files that end early
    outside.py    what a rank learns from its clock, its disk, its user: recorded, and given again

    DIR/rank-00003.index.jsonl      one line of JSON each, with a CRC-32 of its own
    DIR/rank-00003-000.h5 ...       one dataset of bytes each

Who records is `debug.recorder`, who gives answers from a recording `comm.replay`.  A recording is data: nothing in it
names code that is run.
"""
