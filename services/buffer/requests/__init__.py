"""Every prompt and request from submission to acknowledgement: one machine and what it is made of."""
