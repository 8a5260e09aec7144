"""`seer trace`: the way of one prompt through a buffer, from its log."""
