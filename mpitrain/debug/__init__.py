"""Looking at runs: which tensors differ, and by how much."""
