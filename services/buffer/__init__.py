"""Requests, their chunks and where they run."""
