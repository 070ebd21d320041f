"""The step as a list of actions, and the executor that runs it."""
