"""The output of a job: written, continued after an interruption, and finished."""
