"""`nvcli doctor`: whether this machine, and a model where one is named, are fit for a run, and what to do if not."""
