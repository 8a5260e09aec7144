"""Drawings of logs; and texts about the KV pool and drafts, for `seer status` and the end of a rollout."""
