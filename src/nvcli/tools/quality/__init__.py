"""`nvcli compare-quality` measures how far the predictions of one configuration are from those of another."""
