"""Changes to Megatron's model: shards and middle chunks, placement in a V, separate weight gradients."""
