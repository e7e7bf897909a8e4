"""What becomes of Megatron's model: shards and middle chunks, placement in a V, weight gradients of their own."""
