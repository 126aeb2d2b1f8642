"""One row: from its line to a `Job`, and from a `JobResult` to its line."""
