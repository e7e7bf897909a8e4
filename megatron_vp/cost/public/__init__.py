"""Published runs of Megatron next to predictions; the model itself does not depend on them."""
