"""Where messages meet gradients."""
