"""Sockets behind one small interface, so that tests may put others in place of ZeroMQ."""
