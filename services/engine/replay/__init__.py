"""An engine without a model, for tests and the simulator's comparisons."""
