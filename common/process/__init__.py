"""What every service process needs: start and stop, systemd, logs, temporary files."""
