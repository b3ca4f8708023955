"""The log of a run: its events, and the processes that read it while the run writes."""
