"""One engine whose ranks are on several machines: its head, which is the engine, and its other nodes."""
