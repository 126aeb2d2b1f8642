"""`nvcli compare-quality`: how far the answers of one configuration are from those of another."""
