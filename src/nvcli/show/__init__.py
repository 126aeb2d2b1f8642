"""`nvcli show`: looks at the answers of an output, in the terminal."""
