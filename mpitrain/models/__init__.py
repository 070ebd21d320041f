"""Models, built from parallel layers."""
