"""Weight updates: the machine that decides, and the spool that keeps streams of weights."""
