"""The KV pool's own processes: Mooncake's master, and the owner of the pool's memory and disk."""
