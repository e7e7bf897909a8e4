"""How much memory a layer, a rank and what PyTorch does not count take."""
