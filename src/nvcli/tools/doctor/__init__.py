"""`nvcli doctor` checks whether this machine and a model are ready for a run, and says what to fix if not."""
