"""One engine whose ranks are on several machines: its leader, which is the engine, and its other nodes."""
