"""What a job runs on, and in which order its rows are computed."""
