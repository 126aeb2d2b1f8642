"""`nvcli compare-quality`: how far one configuration's predictions are from another's."""
