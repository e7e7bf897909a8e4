"""What a run tells about itself: passes, memory, traces."""
