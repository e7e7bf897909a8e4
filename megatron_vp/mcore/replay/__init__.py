"""One rank of a large job, alone."""
