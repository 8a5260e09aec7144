"""What trainers, buffer and engines agree on about weights."""
