"""Compares published runs of Megatron with predictions. The rest of the cost model does not use these runs."""
