"""`nvcli doctor` finds out whether this machine and a model are fit for a run, and says what to do if not."""
