"""Weight updates: the machine that decides, and the spool that stores streams of weights."""
