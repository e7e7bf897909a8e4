"""The paper's tables: published results, predictions, the fit of the constants, and jobs that repeat the runs."""
