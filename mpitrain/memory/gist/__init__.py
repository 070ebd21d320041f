"""Saved arrays wait encoded: what backward does not need of them is not kept.

    executor = Executor(model, optimizer, mesh, rows, policy=Gist())            # lossless
    executor = Executor(model, optimizer, mesh, rows, policy=Gist(bits=16))     # and factors of products in 16 bits

Between its forward and its backward an activation is only waited for.  It is encoded as soon as it is saved, while
forward goes on with the array itself, and decoded for the node that wants it: forward, and so the loss, is what it is
without, to the last bit.

    planes.py   masks, signs and small numbers: as many bits each as they take
    sparse.py   arrays with many zeros: the others, and their places
    narrow.py   16, 10 or 8 bits instead of 32
    choice.py   which of these an array gets, by what the operations that save it need of it

What an operation needs it says itself (`mpitrain.autograd.needs`).

Source: Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA.
"""

from mpitrain.memory.gist.choice import Gist
from mpitrain.memory.gist.narrow import Narrow
from mpitrain.memory.gist.planes import Planes
from mpitrain.memory.gist.sparse import Sparse

__all__ = ["Gist", "Narrow", "Planes", "Sparse"]
