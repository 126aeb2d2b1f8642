"""Images of rows, from their names or bytes to pixels that the ranks can read."""
