"""A modelled engine without a model's weights, for tests and to compare the simulator with."""
