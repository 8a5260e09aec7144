"""Images on the buffer: which are kept, their files, and how they come and go."""
