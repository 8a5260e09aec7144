"""Speculative decoding: drafts from group trees, verified by our own sampler. See docs/drafts.md."""
