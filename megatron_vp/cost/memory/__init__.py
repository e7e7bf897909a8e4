"""The memory of a layer, of a rank, and outside PyTorch's allocator."""
