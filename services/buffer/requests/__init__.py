"""Every prompt and request from submission to acknowledgement: the request machine and its parts."""
