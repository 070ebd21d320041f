"""PowerSGD: gradients travel as two thin factors, and what they leave out is added to the next gradient.

    D_w = g_w + e_w                 what this rank has to say: its gradient, and what was left out before
    P   = SUM over ranks of D_w Q   n x r; message 1
    P^  = an orthonormal basis of P, the same bits on every rank
    Q   = SUM of D_w^T P^           m x r; message 2; kept: the next step begins with it
    D^  = P^ Q^T                    what the optimizer sees instead of the sum of the gradients
    e_w = D_w - P^ (D_w^T P^)^T     kept by this rank

Nothing is lost, it comes later: D^ of all steps and the errors of all ranks add up to all gradients of all ranks.
As every line is linear in D_w, the sums are the same however the batch is dealt out: a run on any number of data
parallel ranks, on any pipeline, with experts anywhere, is the same run with the same rank of compression.  Over tp it
is not: what each rank holds of a weight is a matrix of its own.

    products.py   the basis and P^ Q^T in an order of their own       matrices.py   which parameters, as which matrices
    sums.py       the two messages of one set of axes                 state.py      what a checkpoint keeps
    reducer.py    the steps: exact ones first, skipped ones

Source: Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727, algorithms 1 and 2, in sums in the place of means; Ramesh
et al. 2021, arXiv:2102.12092, section 2.5 and appendix E (a fixed Q, sums of errors in checkpoints).
"""

from mpitrain.parallel.powersgd.matrices import TABLES, WORTH, Choice, Matrices, view
from mpitrain.parallel.powersgd.reducer import PowerSgd
from mpitrain.parallel.powersgd.state import ERROR, Q

__all__ = ["ERROR", "TABLES", "WORTH", "Choice", "Matrices", "PowerSgd", "Q", "view"]
