"""What is learnt about groups while they run."""
