"""`seer verify`: proof, on the user's own hardware, that no schedule changes a token."""
