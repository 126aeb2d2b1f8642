"""The choice of replicas and GPUs for a job, and of the order in which its rows are computed."""
