"""`seer doctor`: checks of this machine; each ends in a line that passes, or fails with a fix."""
