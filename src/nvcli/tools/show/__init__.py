"""`nvcli show` shows the answers of an output in the terminal."""
