"""What a training run will cost, as pure functions of its sizes: predicted, before a rank starts."""
