"""What a run measured, step by step, where people look for it.

    lines.py         metrics.jsonl, which every run writes: all numbers of every step
    scalars.py       the numbers of a step by name, of one line of it
    table.py         metrics.csv, one row a step, for spreadsheets and pandas
    tensorboard.py   event files for TensorBoard
    sinks.py         all that were asked for, as one

What is written besides metrics.jsonl is made of its lines, so it can be asked for in the middle of a run.
"""

from mpitrain.metrics.lines import MetricsWriter, line_of, read_metrics

__all__ = ["MetricsWriter", "line_of", "read_metrics"]
