"""The simulator: production policies and machines on modelled engines, in virtual time."""
