"""One model replica per process, behind the `Backend` protocol."""
