"""Pure math on tensors: advantages, importance weights, losses, reductions."""
