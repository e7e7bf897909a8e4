"""What others published of training with Megatron, next to predictions; the model itself does not depend on it."""
