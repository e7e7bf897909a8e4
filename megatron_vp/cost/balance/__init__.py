"""Which layers and vocabulary rows each rank holds, so that no rank waits for another."""
