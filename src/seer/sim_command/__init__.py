"""`seer sim`."""
