"""What every service process needs beside its work: its life, its log, its temporary files."""
