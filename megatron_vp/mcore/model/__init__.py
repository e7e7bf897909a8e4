"""Changes to Megatron's model: vocabulary shards, the placement of layers, and separate weight gradients."""
