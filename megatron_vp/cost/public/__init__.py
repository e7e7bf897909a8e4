"""What others published of training with Megatron, beside predictions; the model itself does not depend on it."""
