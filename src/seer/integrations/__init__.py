"""Seer as the rollout side of trainers that people use; each module needs that trainer installed."""
