"""Texts about the KV pool and drafts, for `seer status` and the end of a rollout."""
