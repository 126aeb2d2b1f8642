"""`nvcli check` reports what a job will do with its rows, before a GPU is touched."""
