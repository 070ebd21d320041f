"""What a run computes, in sums that do not depend on how it is laid out over ranks: what `mpitrain compare` reads.

    digester.py   the listener
    course.py     sums of each op's values and gradients
    held.py       of final gradients, weights, the optimizer's state
    batches.py    what a batch held
    following.py  how each value lies across ranks, without messages and without judgement
    passes.py     which op is which, also where a part is made again in backward
    sums.py       the sums of an array
    rows.py       which rows and columns of the whole it has
    weights.py    the factors of rows and columns
    entries.py    what is noted of a step
    writing.py    how they come to a file
    files.py      its format, and how it is read

A sum over the elements of a value is the same number however the value is cut: what ranks hold of it adds up, what they
hold alike counts once, and what they hold as summands adds up as long as the sum is linear.
"""

from mpitrain.debug.digests.digester import Digester
from mpitrain.debug.digests.writing import digesting

__all__ = ["Digester", "digesting"]
