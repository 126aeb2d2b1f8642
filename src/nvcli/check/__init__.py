"""`nvcli check`: what a job will do with its rows, told before a GPU is touched."""
