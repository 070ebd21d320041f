"""Parameters, modules, and layers that never send."""
