"""`python -m mpitrain`: the same as the command `mpitrain`."""

import sys

from mpitrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
