"""The simulator: the production's policies and state machines with models of engines, in virtual time."""
