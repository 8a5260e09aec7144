"""Seer in existing trainers; each module needs its trainer installed."""
