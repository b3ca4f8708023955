"""The command line: its grammar, and a file for each command that does more than call the engine."""
