"""The parent's side of a run: rows to requests, finished requests to rows, progress."""
