"""Position-keyed sampling: one specification, three implementations with the same bits."""
