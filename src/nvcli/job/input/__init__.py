"""The inputs of a job as a stream of rows."""
