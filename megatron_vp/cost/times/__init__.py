"""Times of passes, messages and collectives."""
