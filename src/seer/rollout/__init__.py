"""`seer rollout`: a file of prompts in, a file of responses out."""
