"""Pure decisions, shared by the services and the simulator. Time and randomness are arguments."""
