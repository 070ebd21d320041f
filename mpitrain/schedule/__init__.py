"""`mpitrain schedule`: print, draw and check a pipeline schedule, without a model and without ranks."""
