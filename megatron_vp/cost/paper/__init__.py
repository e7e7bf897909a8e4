"""The paper's tables: their cells and models, predictions, and jobs that repeat the runs."""
