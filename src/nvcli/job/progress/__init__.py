"""How a run stands: its counts over time, on a terminal, in a file, and at its end."""
