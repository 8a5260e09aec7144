"""`seer config check`: what a configuration comes to, and what a cluster should change in it."""
