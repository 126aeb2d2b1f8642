"""Worker processes that build the token masks of structured answers."""
