"""Connections between processes: typed channels, streams, and the sockets below."""
