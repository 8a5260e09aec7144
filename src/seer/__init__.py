"""Seer: fast, strictly on-policy rollouts for LLM reinforcement learning.

Trainers import `seer.client`; the command line is `seer.cli.main`. Importing this package loads neither.
"""

__version__ = "0.4.0"
