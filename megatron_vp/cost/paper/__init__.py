"""The paper's tables: what was run and published, predicted, fitted, run again. The cost model itself is next door."""
