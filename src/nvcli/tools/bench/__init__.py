"""`nvcli bench`: how fast a model runs on this machine, and where the time goes."""
