"""The engine's way to the KV pool: vLLM's Mooncake connector, over a store that cannot hurt it."""
