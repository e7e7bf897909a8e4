"""The paper's tables: published cells, predictions, the fit of the constants, and jobs that run the cells again."""
