"""Memory of a layer, of a rank, and of what PyTorch does not count."""
