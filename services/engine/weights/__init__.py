"""How an engine comes to new weights."""
