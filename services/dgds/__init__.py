"""Grouped token streams, shared between engines."""
