"""Kernels for arrays on a GPU: the names, arguments and results of the references, computed by `csrc`.

Each launcher looks at its arrays once, allocates what comes out, and puts a kernel or two on the current stream; none
waits for the device.  What a kernel does not take goes to the reference, whose formulas CuPy computes.  A name that is
missing here has no version of its own.
"""
