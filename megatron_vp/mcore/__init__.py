"""The only room that knows Megatron: patches, arguments, model surgery, data capture, checkpoints, the CPU platform."""
