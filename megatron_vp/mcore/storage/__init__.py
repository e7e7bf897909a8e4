"""What a run reads and writes: data and checkpoints, checked before it starts."""
