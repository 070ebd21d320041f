"""The script that is verified where none is given: the trainer of mpitrain, as `mpitrain train` runs it."""

from mpitrain.train import main

if __name__ == "__main__":
    main()
