"""What a run was good for, in words and numbers."""
