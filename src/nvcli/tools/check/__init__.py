"""`nvcli check` reports what a job will do with its rows, before any GPU is used."""
