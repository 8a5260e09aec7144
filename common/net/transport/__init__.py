"""Sockets behind one small interface: ZeroMQ in production, memory in tests, faults on purpose."""
