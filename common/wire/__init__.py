"""What travels between processes: messages, their codec, the protocol version."""
