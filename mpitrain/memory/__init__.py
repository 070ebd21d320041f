"""What does not fit: which activations are made again, how they wait (policy, gist), and where (store, offload)."""
