"""Memory models of a layer, of a rank, and of everything outside PyTorch's allocator."""
